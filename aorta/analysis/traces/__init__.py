"""Traces that AORTA did not make: readers into one interval table, and what the table says about overlap.

Enters: files of other tools (Kineto, rocprofv3, nsys, the first AORTA). Leaves: a `table.Trace` for each, then the same
metrics, tables and report as a run of AORTA's own. Must not: load torch, or hold a trace as a tree of Python objects.
"""
