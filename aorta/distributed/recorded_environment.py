"""Names of the environment variables that change a measurement: runs record them, plans keep them equal.

Must not load torch (plans use it).
"""

from __future__ import annotations

from typing import Final

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
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_HIP_ALLOC_CONF",
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
    }
)
