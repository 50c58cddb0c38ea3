"""Device metrics: temperature, power, clocks, utilisation, memory and throttling of the device a rank computes on.

`sampler` opens the requested or the best available source and reads it on a thread of its own. `libraries` has psutil,
NVML and amdsmi, `smi_programs` amd-smi and rocm-smi; `device_identity` finds the physical device.
"""
