"""Device metrics: temperature, power, clocks, utilisation, memory and throttling of the device a rank computes on.

`sampler` opens the requested or the best available source and reads it on a thread of its own. `libraries` has NVML
and amdsmi, `rocm_smi` the program of that name; `device_identity` finds the physical device.
"""
