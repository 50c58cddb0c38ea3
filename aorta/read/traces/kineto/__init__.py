"""Reads Kineto traces: Chrome JSON of torch.profiler, of devices and of CPUs."""
