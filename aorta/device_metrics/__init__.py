"""Device metrics: temperature, power, clocks, utilisation, memory and throttling of the device a rank computes on.

`source_choice` opens the best source available, `sampler` reads it on its own thread, the other files are one source
each.
"""
