"""Loads traces of other tools: torch.profiler, rocprofv3, rocprof, nsys. `files.READERS` lists the formats."""
