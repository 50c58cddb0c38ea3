"""Workloads: models, their losses and their synthetic data, independent of ranks and instrumentation."""
