"""The run: everything is built and wired here, and nowhere else."""
