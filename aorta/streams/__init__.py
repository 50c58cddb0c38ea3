"""Runs of `workload=streams`: patterns of kernels on 1 to 64 streams, which show how many hardware queues a device has.

`patterns` declares which kernels run on which stream, runs them on a device and computes concurrency; `streams_run` is
the run: it finds shared hardware queues, writes `streams.json` and prints the table.
"""
