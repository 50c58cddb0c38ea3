"""Intercepts collectives at torch's dispatcher, and holds every private name of torch that this takes.

Every collective of DDP (C++ reducer), FSDP, tensor parallelism, compiled code and user code goes through a `c10d::*`
dispatcher operator (docs/dev/measuring.md, R1). A kernel registered at the BackendSelect key sees them all. The
original is called through the operator's own `_op_dk`, which releases the interpreter lock inside the backend.
(`torch.library.get_kernel` keeps the lock and deadlocks with gloo's worker threads.)

Must not measure anything, or decide what to do with a call.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist

from aorta.distributed.cuda import is_capturing
from aorta.errors import InstrumentError
from aorta.instrument.transparent import not_compiled

Original: TypeAlias = Callable[[], Any]
Handler: TypeAlias = Callable[[str, tuple[Any, ...], Original], Any]
"""Takes an operator's name, its arguments and a callable that runs the original; returns the caller's result."""

Work: TypeAlias = dist.Work

KNOWN_TORCH: Final = "2.11 to 2.15"
"""Oldest and newest that scripts/torch_versions has been run with."""
STREAM_ORDERED = ("nccl", "xccl", "hccl", "fake")
"""Backends whose `wait()` blocks the current stream and not the host (RCCL is called nccl; fake: `stand_in`)."""
_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


class DispatcherHook:
    """Kernels that override `c10d::<name>` while the object is open.

    Collectives that are being captured into a CUDA graph are passed to torch untouched: marks and streams of AORTA
    would become part of the graph. Graph replays bypass the dispatcher and are not seen.

    Args:
        operators: names to intercept; those this torch lacks are skipped.
        device: what the run computes on.
        handler: called for every intercepted collective.
        on_captured: called for each collective that is being captured into a graph.
        capturing: whether a capture is under way on the caller's stream; None asks torch (on a CPU there is none).

    Raises:
        InstrumentError: this torch lacks something the interception needs; names it, and torch's version.
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
        key = _dispatch_key(device.type)
        self._library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        if capturing is None and device.type != "cpu":
            capturing = is_capturing
        with warnings.catch_warnings():
            # torch warns about the overridden kernel, which is intended here.
            warnings.simplefilter("ignore")
            for name in filter(partial(hasattr, torch.ops.c10d), operators):
                overload = getattr(torch.ops.c10d, name).default
                kernel = _kernel(name, overload, key, handler, on_captured, capturing)
                self._library.impl(  # type: ignore[no-untyped-call]
                    name, kernel, "BackendSelect", with_keyset=True, allow_override=True
                )

    def close(self) -> None:
        self._library._destroy()  # type: ignore[no-untyped-call]


def _kernel(
    name: str,
    overload: Any,
    own_key: Any,
    handler: Handler,
    on_captured: Callable[[], None],
    capturing: Callable[[], bool] | None,
) -> Callable[..., Any]:
    """Return the kernel of one operator.

    It runs with cold caches, between kernels of the model, where every line of Python costs several times what a tight
    loop suggests (docs/dev/measurements.md); each device therefore gets only what it needs.
    """
    original = overload._op_dk
    host_key = _dispatch_key("cpu")

    @not_compiled
    def on_host(_keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return handler(name, args, partial(original, host_key, *args, **kwargs))

    @not_compiled
    def beside_a_device(_keyset: Any, *args: Any, **kwargs: Any) -> Any:
        # A CPU tensor in an accelerator run (gloo beside NCCL) goes to the CPU backend.
        tensor = first_tensor(args)
        key = host_key if tensor is not None and tensor.is_cpu else own_key
        if capturing is not None and capturing():
            on_captured()
            return original(key, *args, **kwargs)
        return handler(name, args, partial(original, key, *args, **kwargs))

    return on_host if own_key == host_key and capturing is None else beside_a_device


@contextmanager
def implemented(device_type: str, kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let Python functions run operators of `c10d` on tensors of a device, for the length of a `with` block: what the
    originals of an interception call in place of a backend.
    """
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    key = torch._C._dispatch_key_for_device(device_type)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the overridden kernel, which is intended here
            for name, kernel in kernels.items():
                library.impl(name, kernel, key, allow_override=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _dispatch_key(device_type: str) -> Any:
    return getattr(torch._C.DispatchKey, torch._C._dispatch_key_for_device(device_type))


def first_tensor(arguments: Any) -> torch.Tensor | None:
    for item in arguments:
        if isinstance(item, torch.Tensor):
            return item
        if isinstance(item, (list, tuple)):
            tensor = first_tensor(item)
            if tensor is not None:
                return tensor
    return None


def work_in(result: Any) -> Work | None:
    """Return the work handle inside an operator's result.

    None where the backend omits it: ProcessGroupNCCL does for a synchronous collective, after which the caller's stream
    continues in order anyway, and for an operation that is being coalesced into a batch.
    """
    boxed = result[-1] if isinstance(result, (tuple, list)) else result
    return None if boxed is None else Work.unbox(boxed)


def with_work(result: Any, work: Work) -> Any:
    return (*result[:-1], work.boxed()) if isinstance(result, (tuple, list)) else work.boxed()


def group_in(argument: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(argument)


def all_groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def counts_of_groups(counted: Callable[[dist.ProcessGroup], int | None]) -> dict[int, int | None]:
    """Return what `counted` says of each process group, by its identity: called at each step, as short as can be."""
    return {id(group): counted(group) for group in list(dist.distributed_c10d._world.pg_map)}


def orders_streams(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether waiting for the group's work on `device` blocks the device while the host continues.

    Where the host blocks (gloo on device tensors, NCCL's blocking wait), only the caller itself may wait.
    """
    blocking = any(os.environ.get(name, "").strip() == "1" for name in _BLOCKING_WAIT)
    return not blocking and ends_on_streams(group, device)


def ends_on_streams(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the group's work on `device` completes after its notification: the future is done, and a
    synchronous call has returned, as soon as the work is in a stream, also where `wait()` blocks the host.
    """
    return group._get_backend(device).name() in STREAM_ORDERED


def issued_by(group: dist.ProcessGroup) -> int | None:
    """Return how many collectives the group's backends have counted (R8); None if any of them keeps no counter.

    Each backend is asked: the group itself answers for its default backend only, which in `cpu:gloo,cuda:nccl` is NCCL.
    """
    try:
        backends: list[Any] = [group._get_backend(device) for device in group._device_types]
        distinct = {id(backend): backend for backend in backends}  # one backend may serve several device types
        return sum(int(backend._get_sequence_number_for_group()) for backend in distinct.values())
    except RuntimeError:
        return None


def counts_point_to_point(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the counter of the backend that serves `device` includes sends and receives.

    gloo counts every operation. ProcessGroupNCCL (RCCL is the same file) and ProcessGroupXCCL count them separately and
    expose only the count of the others; docs/dev/decisions.md, 3. True for a group without a backend for `device`,
    which sends nothing from it.
    """
    try:
        return group._get_backend(device).name() not in ("nccl", "xccl")
    except RuntimeError:
        return True


def shares_communicator(group: dist.ProcessGroup, device: torch.device) -> bool | None:
    """Return whether the group's sends and receives use the communicator of its collectives, and so wait for them.

    ProcessGroupNCCL (RCCL is the same file) creates a communicator for each pair of ranks, unless the group was
    connected eagerly. `init_process_group(device_id=...)` does that, and binds the group and all that are made or split
    from it to the device (`distributed_c10d._new_process_group_helper`, `split_group`). None for other backends.
    """
    return group.bound_device_id is not None if group._get_backend(device).name() == "nccl" else None


def worker_threads(group: dist.ProcessGroup, device: torch.device) -> int:
    """Return how many collectives of one group a CPU backend runs at once (gloo: its worker threads)."""
    try:
        return int(group._get_backend(device).options._threads)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return 1


class Coalescing:
    """Patches the two calls between which a backend coalesces operations into one launch, while the object is open.

    `_coalescing_manager(device=...)` and `batch_isend_irecv` make these calls from Python; no dispatcher operator is
    involved.

    Args:
        on_start: called with the group before coalescing starts.
        on_end: called with the group and a callable that launches the batch; returns the caller's result.
    """

    def __init__(
        self,
        on_start: Callable[[dist.ProcessGroup], None],
        on_end: Callable[[dist.ProcessGroup, Callable[[], Work | None]], Work | None],
    ) -> None:
        start, end = dist.ProcessGroup._start_coalescing, dist.ProcessGroup._end_coalescing
        # As they stand in the class: what the class gives when asked is a function that no longer binds its group.
        own = vars(dist.ProcessGroup)
        self._originals: dict[str, Any] = {name: own[name] for name in ("_start_coalescing", "_end_coalescing")}

        def start_coalescing(group: dist.ProcessGroup, *args: Any) -> None:
            start(group, *args)
            on_start(group)

        def end_coalescing(group: dist.ProcessGroup, *args: Any) -> Work | None:
            return on_end(group, lambda: cast("Work | None", end(group, *args)))

        group_class: Any = dist.ProcessGroup
        group_class._start_coalescing, group_class._end_coalescing = start_coalescing, end_coalescing

    def close(self) -> None:
        for name, method in self._originals.items():
            setattr(dist.ProcessGroup, name, method)


class Interception(Protocol):
    """An active interception of collectives; ends when it is closed."""

    def close(self) -> None:
        """Restore torch as it was."""


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Queue, inside a backward pass, `callback` after its last node, and before callbacks that DDP and FSDP queue
    later.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_pass() -> int:
    """Return the id of the backward pass running on this thread; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def check_torch() -> None:
    """Check that collectives can be intercepted with this torch.

    Raises:
        InstrumentError: this torch lacks something; names it, torch's version, what is lost and what still works.
    """
    missing = [name for name in private_names() if not hasattr(name.owner, name.attribute)]
    if missing:
        raise InstrumentError(
            f"torch {torch.__version__} does not offer {', '.join(name.name for name in missing)}, without which "
            f"{' and '.join(dict.fromkeys(name.lost for name in missing))}; so instrument.mode=observe and dedicated "
            "do not work with it. What still works with instrument.mode=off: training with its losses and step times, "
            "and traces of torch.profiler (profiling.enabled=true), of which `aorta report` measures the overlap. "
            f"AORTA has been run with torch {KNOWN_TORCH}"
        )


class PrivateName(NamedTuple):
    """An attribute of torch that the interception needs; `lost` is what cannot be measured without it."""

    name: str
    owner: Any
    attribute: str
    lost: str


def private_names() -> list[PrivateName]:
    allreduce = torch.ops.c10d.allreduce_.default if hasattr(torch.ops.c10d, "allreduce_") else None
    backend, group, work = torch._C._distributed_c10d.Backend, dist.ProcessGroup, dist.Work
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    of_lost: dict[str, list[tuple[str, Any, str]]] = {
        "collectives cannot be intercepted": [
            ("torch.library.Library._destroy", torch.library.Library, "_destroy"),
            ("torch._C.DispatchKey.CPU", torch._C.DispatchKey, "CPU"),
            ("torch._C._dispatch_key_for_device", torch._C, "_dispatch_key_for_device"),
            ("torch.ops.c10d.allreduce_", torch.ops.c10d, "allreduce_"),
            ("OpOverload._op_dk", allreduce, "_op_dk"),
            ("OpOverload._schema", allreduce, "_schema"),
            ("torch.ScriptObject", torch, "ScriptObject"),
        ],
        "the ends of collectives cannot be seen": [
            ("torch.distributed.Work.unbox", work, "unbox"),
            ("torch.distributed.Work.boxed", work, "boxed"),
            ("torch.distributed._Work", dist, "_Work"),
        ],
        "collectives cannot be told apart by their group": [
            ("torch.distributed.ProcessGroup.unbox", group, "unbox"),
            ("ProcessGroup._get_backend", group, "_get_backend"),
            ("ProcessGroup._device_types", group, "_device_types"),
            ("Backend.name", backend, "name"),
            ("ProcessGroup.bound_device_id", group, "bound_device_id"),
            ("distributed_c10d._world.pg_map", getattr(dist.distributed_c10d, "_world", None), "pg_map"),
        ],
        "nobody can tell whether all collectives were seen": [
            ("Backend._get_sequence_number_for_group", backend, "_get_sequence_number_for_group")
        ],
        "collectives that are launched together cannot be timed": [
            ("ProcessGroup._start_coalescing", group, "_start_coalescing"),
            ("ProcessGroup._end_coalescing", group, "_end_coalescing"),
        ],
        "computation in backward passes cannot be timed": [
            ("Variable._execution_engine.queue_callback", engine, "queue_callback"),
            ("torch._C._current_graph_task_id", torch._C, "_current_graph_task_id"),
        ],
        "traces cannot say which collective a row is": [
            ("torch.autograd.profiler._is_profiler_enabled", torch.autograd.profiler, "_is_profiler_enabled")
        ],
    }
    if dist.is_gloo_available():
        options = getattr(dist.ProcessGroupGloo, "_Options", None)
        of_lost["nobody can tell how many collectives gloo runs at once"] = [
            ("ProcessGroupGloo._Options._threads", options, "_threads")
        ]
    return [PrivateName(*name, lost) for lost, names in of_lost.items() for name in names]
