"""Emulation of a network: collectives are delayed, or replaced, as another fabric would have it (decision 7)."""
