"""Readers of files: what opens them, takes their text apart and converts what it holds."""
