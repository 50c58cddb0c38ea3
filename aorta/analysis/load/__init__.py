"""Loads sources of every kind into the tables of `aorta.analysis.tables`."""
