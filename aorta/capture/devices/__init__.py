"""Device telemetry: temperature, power, clocks, use, memory and throttling of the device a rank computes on.

`choice` opens the best source there is, `sampler` reads it on a thread of its own, the other files are one source each.
"""
