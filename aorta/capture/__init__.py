"""The deep look: profiler windows beside the record, never a condition of it."""
