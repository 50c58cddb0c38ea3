"""The version of AORTA; apart from the package, which loads the public names."""

__version__ = "0.1.0"
