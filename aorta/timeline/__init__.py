"""The definition of overlap: interval algebra and the metrics of one window. Pure Python, no torch, no pandas."""
