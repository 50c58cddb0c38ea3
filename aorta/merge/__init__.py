"""Merges the Chrome traces of all ranks into one file for Perfetto, on one clock, and checks it against causality.

It streams: never more than one event of one trace is in memory (docs/dev/decisions.md, 11). Must not:
load torch or pandas.
"""
