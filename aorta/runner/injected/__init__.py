"""The folder that `aorta record` puts first in PYTHONPATH; it holds `sitecustomize.py` and nothing else."""
