"""The definition of overlap: interval algebra and the metrics of one window. No torch, no pandas."""
