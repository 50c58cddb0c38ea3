"""A check that users run on a machine with CUDA or HIP devices: is telemetry correct, cheap, and free of waits and
races?
"""
