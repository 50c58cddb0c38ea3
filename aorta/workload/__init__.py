"""What is computed: models, their losses and their synthetic data. Knows nothing of ranks or instrumentation."""
