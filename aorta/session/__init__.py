"""The public API for training loops that AORTA did not write: `aorta.record`. Documented in docs/examples/README.md."""
