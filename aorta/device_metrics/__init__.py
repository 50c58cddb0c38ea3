"""Device metrics: temperature, power, clocks, utilisation, memory and throttling of the device a rank computes on.

`sampler` opens the requested or the best available source and reads it on a thread of its own. `libraries` has NVML
and amdsmi and finds the physical device, `rocm_smi` is the program of that name.
"""
