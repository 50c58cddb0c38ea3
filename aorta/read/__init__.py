"""Loads sources of every kind into the frames of `aorta.read.run`."""
