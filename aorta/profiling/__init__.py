"""Optional profiler windows, written beside the record; a run's record never depends on them."""
