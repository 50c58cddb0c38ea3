"""Reads the outputs of rocprofv3: JSON, CSV and rocpd databases."""
