"""Sources of every kind, read into the tables of `aorta.analysis.tables`."""
