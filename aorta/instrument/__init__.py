"""Instrumentation of a run: intercepted collectives, compute ranges, stalls, clocks, and the steps built from them."""
