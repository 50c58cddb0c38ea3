"""What a kernel is, by its name alone."""

from __future__ import annotations

import pytest

from aorta.analysis.load.interval_table import KIND_CODE, NULL, IntervalClass
from aorta.analysis.load.kernel_classifier import NameClassifier, kind_of

COMPUTE, COMM, COPY, UNKNOWN = (
    IntervalClass.COMPUTE,
    IntervalClass.COMM,
    IntervalClass.COPY,
    IntervalClass.UNKNOWN,
)


@pytest.mark.parametrize(
    ("name", "cls", "kind"),
    [
        ("NCCLDEVKERNEL_ALLREDUCE", COMM, "allreduce"),
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
        ("memcpy_like_gemm", COMPUTE, None),
        ("Memcpyish", COMPUTE, None),
        ("", UNKNOWN, None),
        ("   ", UNKNOWN, None),
    ],
)
def test_the_class_and_kind_of_a_kernel(name: str, cls: IntervalClass, kind: str | None) -> None:
    classes, kinds = NameClassifier().kernels([name])
    assert classes.tolist() == [cls]
    assert kinds.tolist() == [KIND_CODE[kind] if kind else NULL]


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
