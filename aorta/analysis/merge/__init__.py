"""Merges the Chrome traces of all ranks into one file for Perfetto, on one clock, and checks it against causality.

It streams: never more than one event of one trace is in memory (docs/dev/decisions/0011-merged-trace.md). Must not:
load torch or pandas.
"""
