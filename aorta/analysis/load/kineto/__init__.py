"""Reads Kineto traces (`torch.profiler.export_chrome_trace`) of AMD and NVIDIA devices, and of CPUs with gloo."""
