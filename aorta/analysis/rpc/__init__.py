"""Analyses an RPC run: one table of every call and what it ran where, and one trace with arrows.

Must not: load torch or pandas.
"""
