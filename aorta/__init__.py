"""AORTA: how well communication hides behind computation in distributed PyTorch training.

Importing this package imports nothing else: the run half needs torch, the analysis half needs pandas, and
neither should pay for the other.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
