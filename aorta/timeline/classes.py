"""The vocabulary of a timeline: lanes, kinds of collectives, the bit of each lane in a record; and which kernels of a
device communicate, copy or compute, by their names, for traces and for live runs.

A table has libraries that communicate; patterns are unanchored (docs/dev/measuring.md, W12) and take time linear in the
length of a name. Any other name with a collective's word may communicate, too: `doubtful` says so unless it is known to
compute. `launches_communication` is of the operator or range that launched a kernel. Must not measure anything, or look
at anything of a kernel but its name.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

COMPUTE: Final = "compute"
COPY: Final = "copy"
AUX: Final = "aux"
BUBBLE: Final = "bubble"

KINDS: Final = (
    "allreduce",
    "reducescatter",
    "allgather",
    "broadcast",
    "alltoall",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
)
"""Kinds of collectives, by their usual names rather than by operator name."""

UNKNOWN_KIND: Final = "collective"
"""Communication whose kind a source does not report (RCCL's one kernel for all, unlinked). Not a kind: only `comm_ms`
counts it. AORTA's own records always know the kind.
"""

LOCKSTEP: Final = frozenset({"allreduce", "reducescatter", "allgather", "alltoall", "barrier"})
"""Kinds that end on no rank before every rank has started."""

LANES: Final = (COMPUTE, *KINDS, COPY, AUX, BUBBLE)
"""Lanes of a timeline. The position is the bit in the `lanes` mask of an active segment."""

NOT_COMMUNICATION: Final = frozenset({COMPUTE, COPY, AUX, BUBBLE})
"""Lanes of a timeline that are not a kind of collective."""

ALWAYS_SHOWN: Final = (COMPUTE, "allreduce", "reducescatter", AUX)
"""Lanes whose milliseconds are in every record even when they are 0."""

TRACE_LANES: Final = (*LANES, UNKNOWN_KIND)
"""Lanes of a trace from another tool. The first bits are those of `LANES`."""


class DeviceKernel(NamedTuple):
    """One kernel of a device as a profiler saw it, in nanoseconds of CLOCK_MONOTONIC; `stream` is the profiler's number
    of it.
    """

    name: str
    stream: int
    start_ns: int
    end_ns: int


_SOURCES: Final = (
    (r"nccl|rccl", "NCCL, RCCL: src/device, ncclDevKernel_*, ncclSymkDevKernel_*; their Gin examples"),
    (r"(?<![a-z])(?:hccl|xccl|cncl|mccl|eccl)|hcom_", "vendors' libraries of the same interface"),
    (r"msccl", "Microsoft: MSCCL (mscclKernel_*), MSCCL++ (namespace mscclpp)"),
    (r"deep_ep(?:::|\d+)(?!layout)", "deepseek-ai/DeepEP: csrc/kernels; layout:: only counts tokens"),
    (r"dpsk::ep", "deepseek-ai/profile-data: the same kernels in its published traces"),
    (r"hybrid_ep::(?:dispatch|combine|device_sync)", "deepseek-ai/DeepEP: csrc/hybrid_ep"),
    (r"mori::|ep(?:dispatch|combine)(?:inter|intra|copyto|sync|all|lowlat)", "ROCm/mori: src/ops/dispatch_combine"),
    (r"userbuffers", "NVIDIA/TransformerEngine: common/comm_gemm_overlap/userbuffers/userbuffers.cu"),
    (r"hybrid_?cube_?mesh|intra_node_comm", "pytorch 2.2 to 2.5: csrc/distributed/c10d/intra_node_comm.cu"),
    (
        r"(?:one|two)_?shot_?(?:hier)?all_?reduce",
        "pytorch CUDASymmetricMemoryOps.cu; TensorRT-LLM customAllReduceKernels.cu",
    ),
    (r"multimem_(?:all|one_shot)|symmetric_memory::", "pytorch: csrc/distributed/c10d/symm_mem"),
    (r"(?<![a-z])barrier_kernel|(?:put|wait)_signal_kernel", "pytorch: symm_mem/CUDASymmetricMemory.cu"),
    (r"all_?to_?all_?v|exchange_?split_?and_?offset", "pytorch: symm_mem/nvshmem_extension.cu"),
    (r"cross_device_reduce|custom_?all_?reduce", "vLLM, SGLang: csrc/custom_all_reduce.cuh; aiter"),
    (r"all_reduce_(?:one|two)_shot", "SGLang: custom all-reduce v2"),
    (r"quick_?reduce|allreduce_prototype", "mk1-project/quickreduce; vLLM csrc/quickreduce"),
    (
        r"all_?reduce_?fusion|moe(?:finalize|reduction)_all_?reduce",
        "flashinfer, TensorRT-LLM: allReduceFusionKernels.cu",
    ),
    (r"(?:one|two)_?shot_?(?:allreduce|reduce)|rms_?norm_?lamport", "TensorRT-LLM: mnnvlAllreduceKernels.cu"),
    (r"moe_?(?:a2a|all_?to_?all|comm_?kernel)|moe_comm", "TensorRT-LLM: moeCommKernels.cu, moeAlltoAllKernels.cu"),
    (r"allgather_(?:vec|lastdim)|reg_all_gather|reduce_scatter_(?:cross_device|first_dim)", "ROCm/aiter: csrc"),
    (r"oneapi_ccl|oneccl|(?<![a-z])ccl(?:_|::)|arc_ll\d*_all", "uxlfoundation/oneCCL: src/coll/algorithms"),
    (r"nv_?shmem|roc_?shmem|(?<![a-z])ishmem", "NVSHMEM, rocSHMEM, Intel SHMEM"),
    (r"dlslime::|(?<![a-z])uccl|(?<![a-z])nixl_|pplx_", "DLSlime, uccl-project/uccl, ai-dynamo/nixl, pplx-kernels"),
    (r"push_pull_halos", "NVIDIA/apex: contrib/csrc/peer_memory"),
)
"""What matches kernels that communicate, and where they come from. `--comm-pattern` adds to them."""

_COPY: Final = (
    r"(?i)__amd_rocclr_(copy|fill)"  # HIP copies and fills run as kernels (rocprofv3)
    r"|^\[?CUDA mem(cpy|set)|^Mem(cpy|set)\b"
)
"""Copies and fills that appear among kernels."""

_NAMESPACES: Final = (
    r"(?i)^triton_[a-z]+_fused"  # Inductor names its kernels after the operators that it fused
    r"|^(?:void )?(?:at|at_cuda_detail|c10|cub|thrust|rocprim|hipcub|ck|ck_tile|cudnn)::|^(?:void )?deep_ep::layout::"
)
_COMPUTES: Final = rf"{_NAMESPACES}|^(?:void )?cutlass|cijk_|gemm|gemv|^nvjet"
_COLLECTIVE: Final = (
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|(?<![a-z])a2a(?![a-z])|broadcast_?(?:kernel|tensor)"
    r"|(?<![a-z])(?:bcast|i?send|i?recv|send_?recv|receive|p2p|multimem|barrier|put_?mem|peer|rdma|ibgda|remote)(?![a-z])"
)
_FUSED: Final = (
    r"(?=.*(?:gemm|gemv|cutlass|matmul)).*(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|(?<![a-z])(?:ag|rs|ar)_gemm|gemm_(?:ag|rs|ar)(?![a-z]))"
)
"""Kernels that multiply and communicate; `cutlass` has it among its parameters."""
_TOKENS: Final = r"(?<![a-z])(?:dispatch|combine|broadcast)(?![a-z])"
_ATTENTION: Final = r"flash|attn|attention|mla|split_?k|sampl|draft"
"""Kernels that combine partial results of one device have these words beside it (flash_fwd_splitkv_combine_kernel)."""
_OPERATOR: Final = (
    r"^(?:_?c10d(?:_functional)?::|symm_mem::(?!\w*(?:matmul|_mm))|record_param_comms|nccl[:A-Z]|deep_ep|mori[:_]"
    # c10d's labels, `nccl:_all_gather_base`: of any backend but gloo, whose label is the work itself
    r"|(?!gloo:)(?:\w{0,30}ccl\w{0,30}:\w"
    r"|[a-z]\w{0,60}:_?(?:all_?reduce_coalesced|all_(?:reduce|gather|to_all)|reduce_scatter)\w*$)"
    r"|_?c10d_functional_autograd::|vllm::all_|vllm::reduce_scatter|sgl_kernel::(?:all_reduce|qr_all_reduce))"
)
_WORD_STARTS: Final = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
_COMM: Final = "(?i)" + "|".join(f"(?:{part})" for part, _ in _SOURCES)


@lru_cache(maxsize=4096)
def communicates(name: str) -> bool:
    """Return whether a kernel of this name is communication."""
    return re.search(_COMM, name) is not None and re.match(r"triton_[a-z]+_fused", name) is None


@lru_cache(maxsize=4096)
def copies(name: str) -> bool:
    """Return whether it is a copy or a fill, of those that do not communicate."""
    return re.search(_COPY, name) is not None


@lru_cache(maxsize=4096)
def computes(name: str) -> bool:
    """Return whether a kernel of this name is known to compute, whoever launched it."""
    return re.search(_COMPUTES, name) is not None


@lru_cache(maxsize=4096)
def doubtful(name: str) -> bool:
    """Return whether a kernel that is counted as computation may communicate: its own name, without parameters, has a
    collective's word; or it multiplies and communicates at once.
    """
    if re.match(_FUSED, in_words(name).lower(), re.DOTALL) and not re.search(_NAMESPACES, name):
        return True
    own = name.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    words = in_words(re.split(r"[<(]", own, maxsplit=1)[0]).lower()
    if computes(name) or not re.search(f"{_COLLECTIVE}|{_TOKENS}", words):
        return False
    return re.search(_COLLECTIVE, words) is not None or re.search(_ATTENTION, words) is None


def launches_communication(text: str) -> bool:
    """Return whether an operator or range of the host issues communication: c10d, symmetric memory, NCCL, DeepEP."""
    return re.match(_OPERATOR, text) is not None


def in_words(name: str) -> str:
    """Return a name with `_` before each word that begins with a capital letter: `ncclAllReduce`, `nccl_All_Reduce`."""
    return re.sub(_WORD_STARTS, "_", name)
