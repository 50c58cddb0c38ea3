"""The one place where collectives are intercepted, with the private names of torch that takes.

Every collective of DDP (C++ reducer), FSDP, tensor parallelism, compiled code and user code reaches a `c10d::*`
dispatcher operator (docs/measuring.md, R1). A kernel at the BackendSelect key sees them all; the original is reached
through the operator's own `_op_dk`, which lets go of the interpreter lock inside the backend. (Calling it by
`torch.library.get_kernel` keeps the lock and deadlocks with gloo's worker threads.)

Must not: measure anything, or decide what to do with a call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from aorta.errors import InstrumentError

Original: TypeAlias = Callable[[], Any]
Handler: TypeAlias = Callable[[str, tuple[Any, ...], Original], Any]
"""Takes an operator's name, its arguments and a call of the original; returns what the caller shall get."""

Work: TypeAlias = dist.Work
_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


class Seam:
    """Kernels over `c10d::<name>` for as long as the object is open.

    Collectives that are being captured into a CUDA graph are left to torch: marks and streams of ours would become
    part of the graph. Their replays pass no dispatcher, so nobody sees them here.

    Args:
        operators: names to intercept, of those this torch has. device: what the run computes on.
        handler: is given every call.
        on_captured: called with each collective that was left to a capture.
        capturing: whether a capture is under way on the caller's stream; None asks torch (on a CPU there is none).

    Raises:
        InstrumentError: this torch lacks something the interception needs; says which name, and which torch it is.
    """

    def __init__(
        self,
        operators: Iterable[str],
        device: torch.device,
        handler: Handler,
        on_captured: Callable[[], None] = lambda: None,
        capturing: Callable[[], bool] | None = None,
    ) -> None:
        check_torch()
        key = getattr(torch._C.DispatchKey, _KEYS[device.type])
        self._library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        if capturing is None and device.type == "cuda":
            capturing = torch.cuda.is_current_stream_capturing
        self.operators = tuple(name for name in operators if hasattr(torch.ops.c10d, name))
        with warnings.catch_warnings():
            # torch warns that a kernel is overridden: that is the purpose.
            warnings.simplefilter("ignore")
            for name in self.operators:
                overload = getattr(torch.ops.c10d, name).default
                kernel = _kernel(name, overload, key, handler, on_captured, capturing)
                self._library.impl(  # type: ignore[no-untyped-call]
                    name, kernel, "BackendSelect", with_keyset=True, allow_override=True
                )

    def close(self) -> None:
        """Put torch back as it was."""
        self._library._destroy()  # type: ignore[no-untyped-call]


def _kernel(
    name: str,
    overload: Any,
    own_key: Any,
    handler: Handler,
    on_captured: Callable[[], None],
    capturing: Callable[[], bool] | None,
) -> Callable[..., Any]:
    """The kernel of one operator. It runs with cold caches, between kernels of the model, where every line of Python
    costs several times what a tight loop says (docs/measurements.md): so each device gets only what it needs.
    """
    original = overload._op_dk
    host_key = getattr(torch._C.DispatchKey, _KEYS["cpu"])

    def on_host(_keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return handler(name, args, partial(original, host_key, *args, **kwargs))

    def beside_a_device(_keyset: Any, *args: Any, **kwargs: Any) -> Any:
        # A CPU tensor on an accelerator's run (gloo beside NCCL) goes to the CPU backend.
        tensor = first_tensor(args)
        key = host_key if tensor is not None and tensor.is_cpu else own_key
        if capturing is not None and capturing():
            on_captured()
            return original(key, *args, **kwargs)
        return handler(name, args, partial(original, key, *args, **kwargs))

    return on_host if own_key == host_key and capturing is None else beside_a_device


def first_tensor(arguments: Any) -> torch.Tensor | None:
    """The first tensor in nested lists of arguments, if any."""
    for item in arguments:
        if isinstance(item, torch.Tensor):
            return item
        if isinstance(item, (list, tuple)):
            found = first_tensor(item)
            if found is not None:
                return found
    return None


def work_in(result: Any) -> Work | None:
    """The work handle inside an operator's result.

    None where the backend left it out: ProcessGroupNCCL does for a synchronous collective, behind which the caller's
    stream runs what comes next anyway, and for an operation that is collected into a batch.
    """
    boxed = result[-1] if isinstance(result, (tuple, list)) else result
    return None if boxed is None else Work.unbox(boxed)


def with_work(result: Any, work: Work) -> Any:
    """An operator's result with another work handle in the place of its own."""
    return (*result[:-1], work.boxed()) if isinstance(result, (tuple, list)) else work.boxed()


def group_in(argument: Any) -> dist.ProcessGroup:
    """The process group behind an operator's argument."""
    return dist.ProcessGroup.unbox(argument)


def all_groups() -> list[dist.ProcessGroup]:
    """Every process group this process belongs to."""
    return list(dist.distributed_c10d._world.pg_map)


def collects(group: dist.ProcessGroup) -> bool:
    """Whether the group's operations are being collected into a batch (`_coalescing_manager`, `batch_isend_irecv`)."""
    return group in dist.distributed_c10d._world.pg_coalesce_state


def issued_by(group: dist.ProcessGroup) -> int | None:
    """How many collectives the group's backends themselves have counted (R8); None where one keeps no counter.

    Asked of each backend: the group itself answers for its default backend only, which in `cpu:gloo,cuda:nccl` is NCCL.
    """
    try:
        backends: list[Any] = [group._get_backend(device) for device in group._device_types]
        distinct = {id(backend): backend for backend in backends}  # one may serve several kinds of device
        return sum(int(backend._get_sequence_number_for_group()) for backend in distinct.values())
    except RuntimeError:
        return None


def counts_point_to_point(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether sends and receives are in the count of the backend that serves `device`.

    gloo counts every operation. ProcessGroupNCCL (RCCL is the same file) and ProcessGroupXCCL count them apart, and
    tell only the count of the others; docs/decisions/0003-sequence-counters-as-coverage.md.
    """
    return group._get_backend(device).name() not in ("nccl", "xccl")


def worker_threads(group: dist.ProcessGroup, device: torch.device) -> int:
    """How many collectives of one group a CPU backend runs at once (gloo: its worker threads)."""
    try:
        return int(group._get_backend(device).options._threads)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return 1


def when_backward_ends(callback: Callable[[], None]) -> None:
    """From inside a backward pass: run `callback` when its last node has run, before DDP's and FSDP's own endings
    that are asked for later.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_pass() -> int:
    """Which backward pass is running on this thread; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def check_torch() -> None:
    """Whether collectives can be intercepted here.

    Raises:
        InstrumentError: this torch lacks something; says which name, and which torch it is.
    """
    if missing := _missing_names():
        raise InstrumentError(
            f"torch {torch.__version__} does not offer {', '.join(missing)}, which the interception of collectives "
            "needs; use a torch that AORTA supports (>= 2.11), or run with instrument.mode=off"
        )


def _missing_names() -> list[str]:
    needed: list[tuple[str, Any, str]] = [
        ("torch.library.Library._destroy", torch.library.Library, "_destroy"),
        ("torch._C.DispatchKey.CPU", torch._C.DispatchKey, "CPU"),
        ("torch._C.DispatchKey.CUDA", torch._C.DispatchKey, "CUDA"),
        ("torch.distributed.Work.unbox", dist.Work, "unbox"),
        ("torch.distributed.Work.boxed", dist.Work, "boxed"),
        ("torch.distributed.ProcessGroup.unbox", dist.ProcessGroup, "unbox"),
        ("torch.distributed._Work", dist, "_Work"),
        ("torch.ops.c10d.allreduce_", torch.ops.c10d, "allreduce_"),
        ("OpOverload._op_dk", torch.ops.c10d.allreduce_.default, "_op_dk"),
        ("OpOverload._schema", torch.ops.c10d.allreduce_.default, "_schema"),
        ("Variable._execution_engine.queue_callback", torch.autograd.Variable._execution_engine, "queue_callback"),
        ("torch.ScriptObject", torch, "ScriptObject"),
        ("torch._C._current_graph_task_id", torch._C, "_current_graph_task_id"),
        ("ProcessGroup._get_backend", dist.ProcessGroup, "_get_backend"),
        ("ProcessGroup._device_types", dist.ProcessGroup, "_device_types"),
        (
            "Backend._get_sequence_number_for_group",
            torch._C._distributed_c10d.Backend,
            "_get_sequence_number_for_group",
        ),
        ("Backend.name", torch._C._distributed_c10d.Backend, "name"),
        ("distributed_c10d._world.pg_map", dist.distributed_c10d._world, "pg_map"),
        ("distributed_c10d._world.pg_coalesce_state", dist.distributed_c10d._world, "pg_coalesce_state"),
    ]
    if dist.is_gloo_available():
        needed.append(("ProcessGroupGloo._Options._threads", dist.ProcessGroupGloo._Options, "_threads"))  # type: ignore[attr-defined]
    return [name for name, owner, attribute in needed if not hasattr(owner, attribute)]
