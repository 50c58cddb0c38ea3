"""Reads traces of other tools: Kineto, rocprofv3, nsys, and the records of the first AORTA.

Each reader returns the same interval table (`table.Trace`), from which the same metrics and reports follow as from
AORTA's own records. Must not: load torch, or hold a trace as a tree of Python objects.
"""
