"""What a user runs on a machine with CUDA or HIP devices: is the telemetry right, cheap, free of waits and of races?"""
