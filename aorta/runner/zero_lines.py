"""Records a training script that has no line of AORTA in it (`aorta record OUT -- COMMAND`).

`injected/sitecustomize.py` calls `patch` for some of torch's modules while the script imports them. The first completed
optimizer step finds the model, which is wrapped and compiled by then, and all ranks begin recording. From then on a
step ends when that optimizer has stepped again, with a training forward pass before it. A step in which something else
came first (an evaluation, a barrier, a distributed checkpoint) begins at its first training forward pass. The recording
ends before the process group is destroyed, or with the program.

Must not import torch or the rest of AORTA before the first optimizer step, wait for another rank without a limit, or
let an error of AORTA reach the script: it is one line, and the training goes on unrecorded.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from aorta.terminal_style import printable
from aorta.runner.api import Recording

VARIABLE: Final = "AORTA_RECORD"
"""Environment variable with the arguments of `aorta.start` as JSON, `folder` among them."""
_MEETING_S: Final = 60.0
"""How long a rank waits at its first optimizer step for the others to come to theirs."""
_REASONS: Final = {
    name: f"aorta record does not see the {what}; give it to recording.note in a loop of your own"
    for name, what in (("loss", "loss"), ("grad_norm", "norm of the gradients"))
}


class _Stops(Exception):
    """Nothing is recorded, or nothing more; `told`: another rank says why."""

    def __init__(self, text: str, *, told: bool = False) -> None:
        super().__init__(text)
        self.told = told


class _ZeroLines:
    """What one process knows of its training."""

    def __init__(self) -> None:
        self.is_over = False
        self.recording: Recording | None = None
        self.first: Optimizer | None = None
        self.thread, self.process = 0, 0
        self.exiting: SystemExit | None = None
        self._depth = threading.local()
        self._hooks: list[Any] = []
        self._before: BaseException | None = None
        self._trains = self._passes = self._interrupted = False
        self._others: set[int] = set()
        self._usual: frozenset[int] | None = None

    # --- what the script calls ----------------------------------------------------------------------------------------

    def around_step(self, step: Callable[..., Any], place: int) -> Callable[..., Any]:
        """Return `step`, which calls `completed` with its argument `place` unless it runs inside of another one."""

        @wraps(step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            import torch

            if self.is_over or torch.compiler.is_compiling():
                return step(*args, **kwargs)
            depth = getattr(self._depth, "value", 0)
            self._depth.value = depth + 1
            try:
                result = step(*args, **kwargs)
            finally:
                self._depth.value = depth
            if depth == 0:
                self.guarded(self.completed, args[place] if len(args) > place else kwargs["optimizer"])
            return result

        return stepped

    def around(
        self,
        function: Callable[..., Any],
        before: Callable[..., None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> Callable[..., Any]:
        """Return `function` with calls around it."""

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                self.guarded(before, *args, **kwargs)
            try:
                return function(*args, **kwargs)
            finally:
                if after is not None:
                    self.guarded(after)

        return called

    def guarded(self, do: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Do what AORTA does here; an error of it ends the recording, and not the script."""
        try:
            if not self.is_over:
                do(*args, **kwargs)
        except Exception as error:  # noqa: BLE001
            self._give_up(error)

    # --- steps --------------------------------------------------------------------------------------------------------

    def completed(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped: the first time recording begins, later a step may end."""
        if self.recording is None:
            self._begin(optimizer)
            return
        if not self._is_here():
            return
        if optimizer is not self.first:
            self._others.add(id(optimizer))
            return
        if not self._hooks:  # everything was compiled in place
            self._unclear("no forward pass can be seen in what was compiled in place")
        elif not (self._trains or self._passes):
            return  # a further group of parameters
        others, self._others = frozenset(self._others), set()
        if self._usual is None:
            self._usual = others
        elif others != self._usual:
            self._unclear("other optimizers stepped in it than in the first step")
        lr = optimizer.param_groups[0].get("lr")
        self.recording.note(lr=lr if isinstance(lr, float) else None)
        self.recording.step()
        self.exiting = None
        self._trains = self._passes = self._interrupted = False
        self._explain()

    def forward(self, module: nn.Module, *, is_root: bool) -> None:
        """A watched module is called: it trains, or evaluates, or cannot tell (in eval mode, with gradients)."""
        import torch

        grad = torch.is_grad_enabled()
        if grad and (module.training or not is_root):
            if not self._trains and self._is_here():
                if self._interrupted or self._passes:
                    self.guarded(self._restart)
                self._trains = True
        elif grad:
            self._passes = True
        elif not module.training:
            self.interrupted()

    def interrupted(self) -> None:
        """An evaluation, a barrier or a checkpoint: no part of a step that has not trained yet."""
        if self.recording is None or not self._is_here():
            return
        if self._trains:
            self._unclear("an evaluation, a barrier or a checkpoint came between its forward pass and its end")
        else:
            self._interrupted = True

    def _restart(self) -> None:
        assert self.recording is not None
        self.recording.restart()
        self._interrupted = self._passes = False

    def _explain(self) -> None:
        assert self.recording is not None
        self.recording.reasons.update(_REASONS)

    def _unclear(self, why: str) -> None:
        assert self.recording is not None
        self.recording.reasons["boundary"] = f"unclear: {why}"

    def _is_here(self) -> bool:
        return threading.get_ident() == self.thread and os.getpid() == self.process

    # --- beginning ----------------------------------------------------------------------------------------------------

    def _begin(self, optimizer: Optimizer) -> None:
        import torch
        import torch.distributed as dist

        together = dist.is_available() and dist.is_initialized()
        if not together and int(os.environ.get("WORLD_SIZE") or 1) > 1:
            return  # a step before the process group is there
        arguments, error = {}, None
        try:
            if torch._C._current_graph_task_id() != -1:
                raise _Stops("an optimizer steps inside of the backward pass, where no step ends; use aorta.record")
            arguments = json.loads(os.environ.pop(VARIABLE, "{}"))  # which no child of this process is to find
            from aorta.runner import api, recorded_run

            if not arguments or recorded_run.open_runs:
                raise _Stops("the program records itself")
            models = list(_trained_models(optimizer))
            if not models:
                raise _Stops("no module in this process holds parameters that an optimizer trains")
        except Exception as problem:  # noqa: BLE001
            error = problem
        if together:
            _agree(error)
        if error is not None:
            raise error
        self._before = sys.exc_info()[1]
        self.first, self.thread, self.process = optimizer, threading.get_ident(), os.getpid()
        self.recording = api.start(**arguments, model=models, timeout_s=_MEETING_S, start_step=1)
        from multiprocessing.util import Finalize

        Finalize(None, self.guarded, (self.end,), exitpriority=1000)  # in children of multiprocessing too
        api.standing_aside.append(partial(self.guarded, self._stand_aside))
        self._watch(models, self.recording.watched)
        self._explain()
        if not together or dist.get_rank() == 0:
            named = ", ".join(type(one).__name__ for one in models)
            _say(f"recording {named} from the second optimizer step on; blocks: {', '.join(self.recording.blocks)}")

    def _watch(self, models: list[nn.Module], modules: Iterable[nn.Module]) -> None:
        """Have `forward` called, before any hook of a strategy: by blocks too, as a framework's module need not be."""
        from aorta.instrument.compute_ranges import ModuleHook

        roots = {id(one) for one in models}
        trained = (one for one in modules if any(parameter.requires_grad for parameter in one.parameters()))
        for module in dict.fromkeys(trained):
            called = partial(self.forward, is_root=id(module) in roots)
            hook = ModuleHook(module, lambda module, _inputs, called=called: called(module))
            self._hooks.append(module.register_forward_pre_hook(hook, prepend=True))

    # --- end ----------------------------------------------------------------------------------------------------------

    def end(self, error: BaseException | None = None) -> None:
        """End the recording, with what ends the program where that is known."""
        if self.recording is None or os.getpid() != self.process:
            return
        for hook in self._hooks:
            hook.remove()
        self.is_over = True
        in_flight = sys.exc_info()[1]
        if in_flight is self._before:
            in_flight = None
        self.recording.close(error or in_flight or getattr(sys, "last_value", None) or self.exiting)

    def _stand_aside(self) -> None:
        raise _Stops("the program records itself")

    def destroying(self, group: Any = None) -> None:
        """The process group is about to be destroyed."""
        import torch.distributed as dist

        if group is None or group is dist.group.WORLD:
            self.end()

    def _give_up(self, error: Exception) -> None:
        told = getattr(error, "told", type(error).__name__ == "PeerFailed" and os.environ.get("RANK", "0") != "0")
        if not told:
            text = str(error) if isinstance(error, _Stops) else f"{type(error).__name__}: {error}"
            _say(f"{'nothing' if self.recording is None else 'nothing more'} is recorded: {text}")
        with suppress(Exception):  # said above
            self.end(error)
        self.is_over = True


def _say(text: str) -> None:
    try:
        sys.stderr.write(f"aorta record: {printable(text)}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # a closed terminal


def _agree(error: Exception | None) -> None:
    """Tell the other ranks that this one is ready, or why it is not, and wait for theirs.

    Raises:
        _Stops: a rank is not ready, or did not come.
    """
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("aorta/zero_lines", world.get_group_store())
    store.set(str(rank), "" if error is None else "not ready")
    if error is not None:
        return
    keys = [str(one) for one in range(size)]
    try:
        store.wait(keys, timedelta(seconds=_MEETING_S))
    except (RuntimeError, OSError):
        late = [key for key in keys if not store.check([key])]
        first = next(one for one in range(size) if str(one) not in late)
        raise _Stops(
            f"rank {', '.join(late)} did not come to a first optimizer step within {_MEETING_S:g} s", told=rank != first
        ) from None
    if any(store.multi_get(keys)):
        raise _Stops("another rank is not ready", told=True)


def _trained_models(optimizer: Optimizer) -> Iterator[nn.Module]:
    """Yield the outermost modules that hold parameters of any optimizer. Where none does, as an optimizer of flat
    partitions (DeepSpeed's) has parameters of its own: those that can be trained.
    """
    import torch

    alive = [one for one in gc.get_objects() if issubclass(type(one), (torch.nn.Module, torch.optim.Optimizer))]
    optimizers = [one for one in alive if isinstance(one, torch.optim.Optimizer)]
    groups = [group for one in (*optimizers, optimizer) for group in getattr(one, "param_groups", ())]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    modules = [one for one in alive if isinstance(one, torch.nn.Module) and "_modules" in one.__dict__]
    inner = {id(child) for one in modules for child in one._modules.values()}
    outermost = [one for one in modules if id(one) not in inner]
    holding = [one for one in outermost if any(id(parameter) in trained for parameter in one.parameters())]
    if holding:
        yield from holding
    else:
        yield from (one for one in outermost if one.training and any(p.requires_grad for p in one.parameters()))


_zero = _ZeroLines()


def patch(module: ModuleType) -> None:
    """Put a call to AORTA around what a script calls of one of torch's modules, which has just been executed."""
    target: Any = module
    match module.__name__:
        case "torch.optim.optimizer":
            hooked = target.Optimizer.profile_hook_step  # what makes the `step` of every class of optimizers
            target.Optimizer.profile_hook_step = staticmethod(lambda step: _zero.around_step(hooked(step), 0))
            leave = sys.exit

            @wraps(leave)
            def exit_(status: Any = None, /) -> Any:
                if _zero._is_here():
                    _zero.exiting = SystemExit(status)
                return leave(status)

            sys.exit = exit_
        case "torch.amp.grad_scaler":  # whose step may skip that of the optimizer
            target.GradScaler.step = _zero.around_step(target.GradScaler.step, 1)
        case "torch.distributed.distributed_c10d":
            target.barrier = _zero.around(target.barrier, after=_zero.interrupted)
            target.destroy_process_group = _zero.around(target.destroy_process_group, before=_zero.destroying)
        case "torch.distributed.checkpoint.state_dict_saver":
            for name in ("save", "async_save"):
                setattr(target, name, _zero.around(getattr(target, name), after=_zero.interrupted))
