"""What a kernel is, by its name alone (docs/dev/measuring.md, W12)."""

from __future__ import annotations

import numpy as np
import pytest

from aorta.analysis.load.interval_table import KIND_CODE, NULL, IntervalClass, NameClassifier, kind_of
from aorta.analysis.load.trace_source import kernels
from tests.analysis.load.kineto_files import ALLREDUCE, GEMM

COMPUTE, COMM, COPY, UNKNOWN = (
    IntervalClass.COMPUTE,
    IntervalClass.COMM,
    IntervalClass.COPY,
    IntervalClass.UNKNOWN,
)


@pytest.mark.parametrize(
    ("name", "cls", "kind"),
    [
        (ALLREDUCE, COMM, "allreduce"),
        ("NCCLDEVKERNEL_ALLREDUCE", COMM, "allreduce"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", COMM, "allreduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", COMM, "reducescatter"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", COMM, "allgather"),
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32", COMM, "allreduce"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", COMM, None),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", COMM, None),
        ("mscclKernel_Sum_half_Simple", COMM, None),
        ("void vllm::cross_device_reduce_2stage<half, 8>(RankData*)", COMM, "allreduce"),
        ("void RcclGenericKernel<1>", COMM, None),
        ("rcclGenericKernel<1, true>", COMM, None),
        ("one_shot_all_reduce_kernel", COMM, "allreduce"),
        ("two_shot_all_reduce_kernel", COMM, "allreduce"),
        ("multimem_one_shot_reduce_kernel", COMM, "allreduce"),
        ("multimem_all_gather_kernel", COMM, "allgather"),
        ("multimem_all_reduce_kernel", COMM, "allreduce"),
        ("nvshmem_put", COMM, None),
        ("void quickreduce::twoshot", COMM, "allreduce"),
        ("__amd_rocclr_copyBuffer.kd", COPY, None),
        ("__amd_rocclr_fillBufferAligned.kd", COPY, None),
        ("[CUDA memcpy Device-to-Host]", COPY, None),
        ("Memset (Device)", COPY, None),
        (GEMM, COMPUTE, None),
        ("void at::native::small_reduce_kernel<4>", COMPUTE, None),
        ("triton_red_fused_all_reduce_1", COMPUTE, None),
        ("memcpy_like_gemm", COMPUTE, None),
        ("Memcpyish", COMPUTE, None),
        ("", UNKNOWN, None),
        ("   ", UNKNOWN, None),
    ],
)
def test_the_class_and_kind_of_a_kernel_w12(name: str, cls: IntervalClass, kind: str | None) -> None:
    rows = kernels("made by hand", NameClassifier(), [name], start_ns=np.array([0]), end_ns=np.array([1]))
    assert rows.cls.tolist() == [cls]
    assert rows.kind.tolist() == [KIND_CODE[kind] if kind else NULL]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("c10d::_reduce_scatter_base_", "reducescatter"),
        ("c10d::scatter_", "scatter"),
        ("c10d::_allgather_base_", "allgather"),
        ("c10d::gather_", "gather"),
        ("c10d::reduce_", "reduce"),
        ("c10d::alltoall_base_", "alltoall"),
        ("all_to_allv", "alltoall"),
        ("ncclBcast", "broadcast"),
        ("ncclSend", "send"),
        ("gloo:irecv", "recv"),
        ("ncclDevKernel_SendRecv", None),
    ],
)
def test_the_kind_that_a_name_tells(name: str, kind: str | None) -> None:
    assert kind_of(name) == (KIND_CODE[kind] if kind else NULL)
