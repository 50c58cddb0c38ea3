"""Runs of `workload=streams`: patterns of kernels on 1 to 64 streams, which show how many hardware queues a device has.

`patterns` declares who runs what after whom, `issue` puts it onto a device and reads the times, `queues` finds the
streams that share a hardware queue, `concurrency` makes numbers of the times, `streams_table` shows them, and
`streams_run` is the run.
"""
