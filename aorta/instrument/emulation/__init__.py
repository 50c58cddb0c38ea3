"""A network that is not there: collectives are delayed, or replaced, as another fabric would have it (decision 7)."""
