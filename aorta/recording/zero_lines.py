"""Records a training script that has no line of AORTA in it (`aorta record OUT -- COMMAND`).

`injected/sitecustomize.py` calls `patch` for some of torch's modules while the script imports them. The first completed
optimizer step finds the model, which is wrapped and compiled by then, and all ranks begin recording. From then on a
step ends when that optimizer has stepped again, with a training forward pass before it. A step in which something else
came first (an evaluation, a barrier, a distributed checkpoint) begins at its first training forward pass. One with a
`torch.save` in it says so, as that is a matter of one rank. The recording ends before the process group is destroyed,
or with the program.

Must not import torch or the rest of AORTA before the first optimizer step, wait for another rank without a limit, or
let an error of AORTA reach the script: it is one line, and the training goes on unrecorded.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from aorta.errors import AortaError, ConfigError, InstrumentError
from aorta.instrument.transparent import hook_optimizers, not_compiled, put_around
from aorta.terminal_style import printable

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import Store
    from torch.optim import Optimizer

    from aorta.recording.api import Recording
    from aorta.recording.meeting import Meeting

VARIABLE: Final = "AORTA_RECORD"
"""Environment variable with the folder of the run."""
_FIRST_STEP_S: Final = 1.0
"""How long the first optimizer step waits for those of the other ranks: ranks that step together begin with it."""


class _ZeroLines:
    """The recording of this process."""

    def __init__(self) -> None:
        self.is_over = False
        self._recording: Recording | None = None
        self._first: Optimizer | None = None
        self._process = self._thread = 0
        self._meeting: Meeting | None = None
        self._why: str | None = None
        self._depth = threading.local()
        self._hooks: list[Any] = []
        self._handled: BaseException | None = None
        self._exit: SystemExit | None = None
        self._trains = self._may_train = self._interrupted = self._saved = False
        self._models: list[nn.Module] = []
        self._behind = 1
        self._roots: set[int] = set()
        self._others: set[int] = set()
        self._usual_others: set[int] | None = None

    @not_compiled
    def guarded(self, do: Callable[..., None], *args: Any) -> None:
        """Do something of AORTA's; an error of it ends the recording, and not the script."""
        recording = self._recording
        try:
            here = self._process == os.getpid() and (self._thread == threading.get_ident() or do == self.end)
            if not self.is_over and (here or not self._process):
                do(*args)
        except Exception as error:  # noqa: BLE001
            with suppress(Exception):
                self.is_over = True
                if recording is not None or _rank() == 0:  # all ranks know why none of them begins
                    text = str(error) if isinstance(error, AortaError) else f"{type(error).__name__}: {error}"
                    text = text.strip().partition("\n")[0]
                    _say(f"nothing {'' if recording is None else 'more '}is recorded: {text}")
                self.end(None, error)

    def expect(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the `step` of a class of optimizers, watched. At the end it is said if none was seen."""
        if self._why is None:
            from multiprocessing.util import Finalize

            self._why = "no optimizer step was seen; inside of torch.compile none is"
            Finalize(None, self._end_with_program, exitpriority=1000)  # in children of multiprocessing too
        return self.around_step(step, 0)

    def around_step(self, step: Callable[..., Any], place: int) -> Callable[..., Any]:
        """Return `step`, which hands the optimizer, its argument `place`, on unless it runs inside of another one."""

        @not_compiled
        def before(*args: Any, **kwargs: Any) -> Callable[[bool], None]:
            depth = getattr(self._depth, "value", 0)
            self._depth.value = depth + 1

            @not_compiled
            def after(returned: bool) -> None:
                self._depth.value = depth
                if depth == 0 and returned:
                    optimizer = args[place] if len(args) > place else kwargs["optimizer"]
                    self.guarded(self._begin if self._recording is None else self._stepped, optimizer)

            return after

        return put_around(step, before)

    def _begin(self, optimizer: Optimizer) -> None:
        import torch
        import torch.distributed as dist

        if self._meeting is not None:
            if optimizer is self._first and self._meeting.stepped():
                self._begun(self._meeting.result)
            return
        together = dist.is_available() and dist.is_initialized()
        if not together and int(os.environ.get("WORLD_SIZE") or 1) > 1:
            self._why = f"torch.distributed was not initialised, with WORLD_SIZE={os.environ['WORLD_SIZE']}"
            return
        try:
            from aorta.recording import api, recorded_run
            from aorta.recording.meeting import AGREED_STEP_S, Meeting, announce

            if torch._C._current_graph_task_id() != -1:
                raise InstrumentError("an optimizer steps inside the backward pass, so steps have no end")
            if recorded_run.open_runs:
                raise ConfigError("the program records itself")
            folder = os.environ.pop(VARIABLE)  # which no child of this process is to find
            models = _trained_models(optimizer)
        except Exception as error:
            if together:
                announce(_own_store(), dist.get_rank(), f"{type(error).__name__}: {error}")
            raise
        self._first, self._handled = optimizer, sys.exc_info()[1]
        self._roots = {id(root) for model in models for root in _wrapped(model)}
        self._process, self._thread = os.getpid(), threading.get_ident()
        api.standing_aside.append(self._stand_aside)

        def open_run(behind: int) -> Recording:
            recording = api.start(folder, model=models, timeout_s=AGREED_STEP_S, start_step=behind)
            self._models, self._behind = models, behind
            return recording

        if together and dist.get_world_size() > 1:
            self._meeting = Meeting(_own_store(), dist.get_rank(), dist.get_world_size(), open_run)
            if self._meeting.stepped(_FIRST_STEP_S):
                self._begun(self._meeting.result)
        else:
            self._begun(open_run(1))

    def _begun(self, recording: Recording) -> None:
        from aorta.instrument.compute_ranges import ModuleHook

        self._recording = recording
        recording.restart()  # in the thread that trains
        for module in dict.fromkeys(self._recording.watched):
            # Blocks too, as a framework need not call the model itself; in front of a strategy's hooks.
            if any(parameter.requires_grad for parameter in module.parameters()):
                hook = ModuleHook(module, partial(self.guarded, self._forward))
                self._hooks.append(module.register_forward_pre_hook(hook, prepend=True))
        peers, left_out = (None, []) if self._meeting is None else (self._meeting.peers, self._meeting.left_out)
        if peers is None or peers.is_first:
            named = ", ".join(type(model).__name__ for model in self._models)
            since = "second step" if self._behind == 1 else f"step {self._behind + 1}"
            _say(f"recording {named} from its {since} on; blocks: {', '.join(recording.blocks)}")
            if left_out:
                _say(f"not recorded, as they have taken no optimizer step: ranks {', '.join(map(str, left_out))}")

    def _stepped(self, optimizer: Optimizer) -> None:
        assert self._recording is not None
        if optimizer is not self._first:
            self._others.add(id(optimizer))
            return
        if not self._hooks:
            self._recording.unclear("no forward pass is seen in a model that is compiled in place")
        elif not (self._trains or self._may_train):
            return  # DeepSpeed steps once for each group of parameters
        if self._others != (self._usual_others or self._others):
            self._recording.unclear("other optimizers stepped in it than in other steps")
        if self._saved:
            self._recording.unclear("a torch.save of this rank, of which the others know nothing, is part of it")
        self._usual_others, self._others = self._usual_others or self._others, set()
        lr = optimizer.param_groups[0].get("lr")
        self._recording.note(lr=lr if isinstance(lr, float) else None)
        self._recording.step()
        self._exit = None
        self._trains = self._may_train = self._interrupted = self._saved = False

    def _forward(self, module: nn.Module, _inputs: object) -> None:
        import torch

        assert self._recording is not None
        if torch.is_grad_enabled() and module.training:
            if not self._trains and (self._interrupted or self._may_train):
                self._recording.restart()
                self._saved = False
            self._trains = True
        elif torch.is_grad_enabled():
            self._may_train = True  # or evaluates
        elif not module.training:
            self.interrupt()

    def interrupt(self, *_: Any) -> None:
        """An evaluation, a barrier or a checkpoint: no part of a step that has not trained yet."""
        if self._recording is None:
            return
        if self._trains:
            self._recording.unclear("an evaluation, barrier or checkpoint came between its forward pass and its end")
        self._interrupted = True

    def evaluates(self, module: nn.Module) -> None:
        """A module is put into evaluation mode: a model, what it wraps, or another wrapper of that. A trainer compiles
        the inner model a second time for an evaluation, whose forward passes no hook sees then.
        """
        if any(id(root) in self._roots for root in _wrapped(module)):
            self.interrupt()

    def saves(self, *_: Any) -> None:
        """The script calls `torch.save`."""
        self._saved = self._recording is not None

    def exit(self, status: Any = None) -> None:
        """The script calls `sys.exit`."""
        self._exit = SystemExit(status)

    def _stand_aside(self) -> None:
        from aorta.recording.meeting import joined

        if self._recording is not None or (self._meeting is not None and joined.get() is None):
            _say(error := "the program records itself from here on")
            self.guarded(self.end, None, ConfigError(error))

    def _end_with_program(self) -> None:
        # Set by the interpreter once it has printed what ended the program.
        self.guarded(self.end, None, sys.exc_info()[1] or getattr(sys, "last_value", None) or self._exit)
        self.guarded(self._never_began)

    def _never_began(self) -> None:
        if self._recording is None and self._why is not None and not self.is_over:
            self.is_over = True
            if os.environ.get("RANK", "0") == "0":
                _say(f"nothing is recorded: {self._why}")

    def end(self, group: Any = None, error: BaseException | None = None) -> None:
        """End the recording: before its process group is destroyed, or with what ends the program."""
        import torch.distributed as dist

        if group is not None and group is not dist.group.WORLD:
            return
        if self._recording is None:
            if self._meeting is not None:
                self._why = self._meeting.give_up()
                self._never_began()
            return
        recording, self._recording, self.is_over = self._recording, None, True
        for hook in self._hooks:
            hook.remove()
        in_flight = sys.exc_info()[1]
        recording.close(error or (None if in_flight is self._handled else in_flight))


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # a closed terminal
        sys.stderr.write(f"aorta record: {printable(text)}\n")
        sys.stderr.flush()


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _own_store() -> Store:
    """Return a connection of AORTA's own to the store of the default process group."""
    import torch.distributed as dist

    from aorta.recording.rank_process import default_store

    return dist.PrefixStore("aorta/zero_lines", default_store().clone())  # type: ignore[attr-defined]  # not in its stubs


def _wrapped(model: nn.Module | None) -> Iterator[nn.Module]:
    """Yield a model, and what it wraps: that of DistributedDataParallel, that of `torch.compile`."""
    while model is not None:
        yield model
        model = model._modules.get("module") or model._modules.get("_orig_mod")


def _trained_models(optimizer: Optimizer) -> list[nn.Module]:
    """Return the outermost modules that hold parameters of any optimizer. Where none does, as an optimizer of flat
    partitions (DeepSpeed's) has parameters of its own: those that can be trained.
    """
    import torch

    alive = [one for one in gc.get_objects() if issubclass(type(one), (torch.nn.Module, torch.optim.Optimizer))]
    groups = [group for one in (*alive, optimizer) for group in getattr(one, "param_groups", ())]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    modules = [one for one in alive if isinstance(one, torch.nn.Module) and "_modules" in one.__dict__]
    inner = {id(child) for module in modules for child in module._modules.values()}
    outermost = [module for module in modules if id(module) not in inner]
    holding = [one for one in outermost if any(id(parameter) in trained for parameter in one.parameters())]
    return holding or [one for one in outermost if one.training and any(p.requires_grad for p in one.parameters())]


_zero = _ZeroLines()


def _call_before(owner: Any, name: str, do: Callable[..., None]) -> None:
    """Have AORTA called in front of a function of `owner`, with its arguments."""

    @not_compiled
    def before(*args: Any, **kwargs: Any) -> None:
        _zero.guarded(do, *args, *kwargs.values())

    setattr(owner, name, put_around(getattr(owner, name), before))


def _without_hooks(model: nn.Module, *_args: Any, **_named: Any) -> Callable[[bool], None]:
    from aorta.instrument.compute_ranges import taken_out

    return taken_out(model)


def patch(module: ModuleType) -> None:
    """Put calls of AORTA around what scripts call of one of torch's modules, which has just been executed."""
    target: Any = module
    match module.__name__:
        case "torch.optim.optimizer":
            hook_optimizers()
            hooked = target.Optimizer.profile_hook_step  # makes the `step` of every class of optimizers
            target.Optimizer.profile_hook_step = staticmethod(lambda step: _zero.expect(hooked(step)))
            _call_before(sys, "exit", _zero.exit)
        case "torch.nn.modules.module":
            _call_before(target.Module, "eval", _zero.evaluates)
        case "torch.jit._recursive":
            target.create_script_module = put_around(target.create_script_module, _without_hooks)
        case "torch.serialization":
            _call_before(target, "save", _zero.saves)
        case "torch.amp.grad_scaler":  # whose step may leave out that of the optimizer
            target.GradScaler.step = _zero.around_step(target.GradScaler.step, 1)
        case "torch.distributed.distributed_c10d":
            _call_before(target, "barrier", _zero.interrupt)
            _call_before(target, "destroy_process_group", _zero.end)
        case "torch.distributed.checkpoint.state_dict_saver":
            _call_before(target, "save", _zero.interrupt)
            _call_before(target, "async_save", _zero.interrupt)
