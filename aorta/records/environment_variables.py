"""Environment variables that change a measurement: which are recorded, and what they mean.

    check_variable("GPU_MAX_HW_QUEUES", "0")            InputError: ...: a whole number from 1

Runs record the variables of `ENVIRONMENT_PREFIXES` and `ENVIRONMENT_NAMES`, plans keep them equal. A variable that is
not known may be given all the same. Must not set or read any, or load torch (plans use it).

Sources of meanings and values: the environment variable pages of the user guides of NCCL 2.30, RCCL, HIP and
ROCR-Runtime 7, the appendix "CUDA Environment Variables" of the CUDA programming guide, and that of torch.distributed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from aorta.errors import InputError

ENVIRONMENT_PREFIXES: Final = (
    "NCCL_",
    "RCCL_",
    "TORCH_NCCL_",
    "GLOO_",
    "HIP_",
    "HSA_",
    "ROCR_",
    "CUDA_",
    "AMD_",
    "MSCCL",
)
ENVIRONMENT_NAMES: Final = frozenset(
    {
        "GPU_MAX_HW_QUEUES",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_HIP_ALLOC_CONF",
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
    }
)

_FLAG: Final = ("0", "1")
_DISTANCES: Final = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")
"""Of NCCL's topology: never, NVLink, one PCI switch, several, one NUMA node, across NUMA nodes."""


@dataclass(frozen=True)
class Variable:
    """A variable and its values: `choices`, or whole numbers from `least` to `most`."""

    name: str
    meaning: str
    choices: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    excludes: bool = False
    """Whether `^` before a choice allows all others."""

    @property
    def allowed(self) -> str:
        """Its values in words."""
        if self.choices:
            named = " or ".join((", ".join(self.choices[:-1]), self.choices[-1]))
            return f"{named}; with ^ before it all others" if self.excludes else named
        return f"a whole number from {self.least}" + ("" if self.most is None else f" to {self.most}")

    def takes(self, value: str) -> bool:
        """Return whether a value is one of those."""
        if self.choices:
            named = value.removeprefix("^") if self.excludes else value
            return named.upper() in {choice.upper() for choice in self.choices}
        number = int(value) if re.fullmatch(r"[0-9]{1,18}", value) else -1
        return self.least <= number and (self.most is None or number <= self.most)


_VARIABLES: Final = (
    Variable("NCCL_MIN_NCHANNELS", "least channels, each a block of the GPU, of a collective", least=1),
    Variable("NCCL_MAX_NCHANNELS", "most channels, each a block of the GPU, of a collective", least=1),
    Variable("NCCL_MIN_CTAS", "least blocks (CTAs) of a collective", least=1),
    Variable("NCCL_MAX_CTAS", "most blocks (CTAs) of a collective", least=1),
    Variable("NCCL_NTHREADS", "threads of each block", ("64", "128", "256", "512")),
    Variable("NCCL_BUFFSIZE", "bytes of the buffer between two GPUs; 4194304 by default", least=1),
    Variable(
        "NCCL_ALGO",
        "the only algorithm that may be used",
        ("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT"),
        excludes=True,
    ),
    Variable("NCCL_PROTO", "the only protocol that may be used", ("LL", "LL128", "Simple"), excludes=True),
    Variable("NCCL_CGA_CLUSTER_SIZE", "blocks of a thread block cluster", least=0, most=8),
    Variable("NCCL_P2P_DISABLE", "1: no direct access between GPUs", _FLAG),
    Variable("NCCL_P2P_LEVEL", "farthest GPUs that access each other directly", _DISTANCES),
    Variable("NCCL_NET_GDR_LEVEL", "farthest GPU and network card that use GPUDirect RDMA", _DISTANCES),
    Variable("NCCL_SHM_DISABLE", "1: no shared memory between processes of a host", _FLAG),
    Variable("NCCL_IB_DISABLE", "1: sockets in place of InfiniBand and RoCE", _FLAG),
    Variable("NCCL_CROSS_NIC", "1: a ring may change network cards between nodes; 2: where it helps", ("0", "1", "2")),
    Variable("NCCL_SOCKET_NTHREADS", "threads of a connection over sockets", least=1, most=16),
    Variable("NCCL_NSOCKS_PERTHREAD", "sockets of each such thread", least=1),
    Variable("NCCL_CUMEM_ENABLE", "1: buffers from CUDA's virtual memory; -2: where supported", ("0", "1", "-2")),
    Variable("TORCH_NCCL_HIGH_PRIORITY", "1: collectives on streams of high priority", _FLAG),
    Variable("TORCH_NCCL_AVOID_RECORD_STREAMS", "1: tensors are kept by handles, not marked in the allocator", _FLAG),
    Variable("RCCL_MSCCL_ENABLE", "1: algorithms of MSCCL where it has one", _FLAG),
    Variable("RCCL_MSCCLPP_ENABLE", "1: kernels of MSCCL++ where it has one", _FLAG),
    Variable("GPU_MAX_HW_QUEUES", "hardware queues that the streams of a process share on ROCm; 4 by default", least=1),
    Variable("CUDA_DEVICE_MAX_CONNECTIONS", "work queues from host to device on CUDA; 8 by default", least=1, most=32),
    Variable("HSA_ENABLE_SDMA", "0: copies by kernels in place of copy engines", _FLAG),
    Variable("HSA_ENABLE_PEER_SDMA", "0: copies between devices by kernels in place of copy engines", _FLAG),
    Variable("HSA_NO_SCRATCH_RECLAIM", "1: scratch memory stays with its queue", _FLAG),
    Variable("HIP_FORCE_DEV_KERNARG", "1: arguments of kernels in device memory", _FLAG),
    Variable("HIP_LAUNCH_BLOCKING", "1: the host waits for every kernel, so nothing overlaps", _FLAG),
    Variable("CUDA_LAUNCH_BLOCKING", "1: the host waits for every kernel, so nothing overlaps", _FLAG),
    Variable("OMP_NUM_THREADS", "threads of an operator on the CPU", least=1),
    Variable("MKL_NUM_THREADS", "threads of an operator of MKL on the CPU", least=1),
)
KNOWN_VARIABLES: Final = {variable.name: variable for variable in _VARIABLES}


def check_variable(name: str, value: str) -> None:
    """Check the value of a variable; one that is not known here takes any.

    Raises:
        InputError: a known one does not take that value, or the name is none of an environment variable.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise InputError(f"{name!r}: not the name of an environment variable: letters, digits and _")
    known = KNOWN_VARIABLES.get(name)
    if known is not None and not known.takes(value):
        raise InputError(f"{name}={value}: {known.meaning}; {known.allowed}")
