"""A simulated device: a CPU build of torch with an asynchronous accelerator that answers to the name `cuda`.

A harness for tests of the device path where there is no card. Streams are threads, data effects really happen, time is
virtual, and a process group keeps the contract of NCCL's. It proves our logic of streams, events,
lifetimes and order. It does not prove CUDA, HIP, NCCL or what anything costs on a card: say so with every figure.

    python -m tests.simulated.build                                        # once
    AORTA_SIMULATED_DEVICE=virtual python -m pytest -m "gpu or simulated"  # tests, in a process with the device
    PYTHONPATH=tests/simulated/site AORTA_SIMULATED_DEVICE=virtual python train.py training.device=cuda ...

`device.py` is what tests set and read, `programs.py` runs scripts on several ranks, `native/` is the device itself:
clock, streams, races, memory, guard, operators, link and transfers (bytes between ranks), process_group, module.
"""
