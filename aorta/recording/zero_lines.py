"""Records a training script that has no line of AORTA in it (`aorta record OUT -- COMMAND`).

`injected/sitecustomize.py` calls `patch` for some of torch's modules while the script imports them. The first completed
optimizer step finds the model, which is wrapped and compiled by then, and all ranks begin recording. From then on a
step ends when that optimizer has stepped again, with a training forward pass before it. What comes in nearly every step
(an evaluation, a barrier, a distributed checkpoint) is part of it. What comes rarely is between steps: the step behind
it begins at its first training forward pass, and says so. One with a `torch.save` in it says so too, as that is a
matter of one rank. The recording ends before the process group is destroyed, or with the program.

Must not import torch or the rest of AORTA before the first optimizer step, wait for another rank without a limit, or
let an error of AORTA reach the script: it is one line, and the training goes on unrecorded.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from aorta.errors import AortaError, ConfigError, InstrumentError
from aorta.instrument.transparent import hook_optimizers, not_compiled, put_around
from aorta.terminal_style import printable

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from aorta.recording.meeting import Meeting
    from aorta.recording.open_recording import Recording

VARIABLE: Final = "AORTA_RECORD"
"""Environment variable with the folder of the run."""
VARIABLE_OF_EVERY: Final = "AORTA_RECORD_EVERY"
"""Another one, with `instrument.every` where that is not 1."""
_RECENT, _USUAL = 5, 4
"""What came in 4 of the last 5 steps is part of a step: known before the 5 steps of the warm-up are over."""
_FIRST_STEP_S: Final = 1.0
"""How long the first optimizer step waits for those of the other ranks: ranks that step together begin with it."""


class _ZeroLines:
    """The recording of this process."""

    def __init__(self) -> None:
        self.is_over = False
        self._folder = os.environ.get(VARIABLE, "")
        self._recording: Recording | None = None
        self._first: Callable[[], Optimizer | None] = lambda: None
        self._process = self._thread = 0
        self._meeting: Meeting | None = None
        self._why: str | None = None
        self._depth = threading.local()
        self._observed: list[Callable[[], None]] = []
        self._handled: BaseException | None = None
        self._exit: SystemExit | None = None
        self._trains = self._may_train = self._saved = False
        self._came: set[tuple[str, bool]] = set()
        self._recent: deque[set[tuple[str, bool]]] = deque(maxlen=_RECENT)
        self._begins = ""
        self._roots: set[type] = set()
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
                    if recording is None:
                        self._explain(text)
                    else:
                        _say(f"nothing more is recorded: {text}")
                self.end(None, error)

    def expect(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the `step` of a class of optimizers, watched. At the end it is said if none was seen."""
        if self._why is None:
            from multiprocessing.util import Finalize

            self._why = "no optimizer step was seen; inside of torch.compile none is"
            Finalize(None, self._end_with_program, exitpriority=1000)  # in children of multiprocessing too
        return self.around_step(step, 0)

    def around_step(self, step: Callable[..., Any], index: int, *, engine: bool = False) -> Callable[..., Any]:
        """Return `step`, which hands the optimizer, its argument `place`, on unless it runs inside of another one.

        Args:
            engine: of DeepSpeed, whose `step` issues collectives behind that of its optimizer; they are part of it.
        """

        @not_compiled
        def before(*args: Any, **kwargs: Any) -> Callable[[bool], None]:
            depth = getattr(self._depth, "value", 0)
            self._depth.value = depth + 1
            self._depth.inner, ends = None, True
            if engine and not self.is_over:
                ends = args[index].is_gradient_accumulation_boundary()  # which counts on in `step`

            @not_compiled
            def after(returned: bool) -> None:
                self._depth.value = depth
                optimizer = args[index] if len(args) > index else kwargs["optimizer"]
                if engine:  # where gradients overflowed, its optimizer has made no step
                    optimizer = self._depth.inner or self._first()
                self._depth.inner = optimizer if depth else None
                if depth == 0 and returned and ends and optimizer is not None:
                    self.guarded(self._begin if self._recording is None else self._stepped, optimizer)

            return after

        return put_around(step, before)

    def _begin(self, optimizer: Optimizer) -> None:
        import torch
        import torch.distributed as dist

        if self._meeting is not None:
            if optimizer is self._first() and self._meeting.stepped():
                self._begun(self._meeting.result)
            return
        together = dist.is_available() and dist.is_initialized()
        if not together and int(os.environ.get("WORLD_SIZE") or 1) > 1:
            self._why = f"torch.distributed was not initialised, with WORLD_SIZE={os.environ['WORLD_SIZE']}"
            return
        try:
            from aorta.instrument.native.build import ensure_built
            from aorta.recording import api, open_recording, recorded_run
            from aorta.recording.meeting import AGREED_STEP_S, Meeting, announce, own_store

            if torch._C._current_graph_task_id() != -1:
                raise InstrumentError("an optimizer steps inside the backward pass, so steps have no end")
            if recorded_run.open_runs:
                raise ConfigError("the program records itself")
            every, folder = os.environ.pop(VARIABLE_OF_EVERY, "1"), os.environ.pop(VARIABLE)  # no child is to find them
            models = trained_models(optimizer)
        except Exception as error:
            if together:
                announce(own_store(), dist.get_rank(), f"{type(error).__name__}: {error}")
            raise
        self._first, self._handled = weakref.ref(optimizer), sys.exc_info()[1]
        self._roots = {type(root) for model in models for root in wrapped(model)}
        count, kind = steps_made(optimizer), type(optimizer).__name__
        self._process, self._thread = os.getpid(), threading.get_ident()
        api.standing_aside.append(self._stand_aside)

        def compile_once() -> None:
            with api.NamedLines(logging.WARNING):
                ensure_built("dedicated", wanted=True, emulated=False)

        def open_run(behind: int) -> Recording:
            number = behind if count is None else count - 1 + behind
            (context := copy_context()).run(open_recording.without_lines.set, True)
            start = partial(api.start, folder, model=models, timeout_s=AGREED_STEP_S, start_step=number, every=every)
            recording = context.run(start)
            named = ", ".join(type(model).__name__ for model in models)
            self._begins = f"{named} from {'its second step' if number == 1 else f'step {number}'} on"
            if count is None:
                self._begins += f", as step {number} ({kind} does not count them)"
            return recording

        if together and dist.get_world_size() > 1:
            self._meeting = Meeting(own_store(), dist.get_rank(), dist.get_world_size(), compile_once, open_run)
            if self._meeting.stepped(_FIRST_STEP_S):
                self._begun(self._meeting.result)
        else:
            self._begun(open_run(1))

    def _begun(self, recording: Recording) -> None:
        from aorta.instrument.module_hooks import observe

        self._recording = recording
        recording.restart()  # in the thread that trains
        watched = (module for reference in recording.watched if (module := reference()) is not None)
        for module in dict.fromkeys(watched):
            # Blocks too, as a framework need not call the model itself; in front of a strategy's hooks.
            if any(parameter.requires_grad for parameter in module.parameters()):
                forward = partial(self.guarded, self._forward, tuple(map(weakref.ref, module.modules())))
                self._observed.append(observe(module, before=forward, first=True))
        peers, left_out = (None, []) if self._meeting is None else (self._meeting.peers, self._meeting.left_out)
        if peers is None or peers.is_first:
            _say(f"recording {self._begins}; blocks: {', '.join(recording.blocks)}")
            if left_out:
                _say(f"not recorded, as they have taken no optimizer step: ranks {', '.join(map(str, left_out))}")

    def _stepped(self, optimizer: Optimizer) -> None:
        assert self._recording is not None
        if optimizer is not self._first():
            self._others.add(id(optimizer))
            return
        if not self._observed:
            self._recording.unclear("no forward pass is seen in a model that is compiled in place")
        elif not (self._trains or self._may_train):
            return  # DeepSpeed steps once for each group of parameters
        if rare := self._rare(inside=True):
            self._recording.unclear(f"{rare} came between its forward pass and its end")
        if self._others != (self._usual_others or self._others):
            self._recording.unclear("other optimizers stepped in it than in other steps")
        if self._saved:
            self._recording.unclear("a torch.save of this rank, of which the others know nothing, is part of it")
        self._usual_others, self._others = self._usual_others or self._others, set()
        lr = optimizer.param_groups[0].get("lr")
        self._recording.note(lr=lr if isinstance(lr, float) else None)
        self._recording.step()
        self._recent.append(self._came)
        self._came = set()
        self._trains = self._may_train = self._saved = False

    def _forward(self, inside: tuple[weakref.ref[nn.Module], ...], *_call: object) -> None:
        import torch

        assert self._recording is not None
        # Of a wrapper or a frozen part it may say otherwise.
        trains = any(module.training for reference in inside if (module := reference()) is not None)
        if torch.is_grad_enabled() and trains:
            if not self._trains and (rare := self._rare(inside=False)):
                self._recording.restart()
                self._recording.unclear(f"{rare} came before it: it begins at its forward pass")
                self._saved = False
            self._trains = True
        elif torch.is_grad_enabled():
            self._may_train = True  # or evaluates
            if not self._trains:
                self.interrupt("a forward pass in evaluation mode")
        elif not trains:
            self.interrupt("an evaluation")

    def interrupt(self, what: str, *_: Any) -> None:
        """Note an evaluation, a barrier or a checkpoint: no part of the step, unless most steps have it."""
        if self._recording is not None:
            self._came.add((what, self._trains))

    def _rare(self, *, inside: bool) -> str:
        """Return what has come in this step as in few others, before its first training forward pass or behind it."""
        came = [key for key in self._came if key[1] == inside]
        return " and ".join(sorted(key[0] for key in came if sum(key in step for step in self._recent) < _USUAL))

    def evaluates(self, module: nn.Module) -> None:
        """A module is put into evaluation mode. Trainers evaluate an average of the model, which is of its class, or
        compile the inner model a second time, whose forward passes no hook sees then.
        """
        if any(type(root) in self._roots for root in wrapped(module)):
            self.interrupt("an evaluation")

    def saves(self, *_: Any) -> None:
        """The script calls `torch.save`."""
        self._saved = self._recording is not None

    def exits(self, status: object) -> None:
        """The interpreter has taken a SystemExit: the program ends."""
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
                self._explain(self._why)

    def _explain(self, why: str) -> None:
        """Say why nothing is recorded, also in the note of `aorta record`, for the report, in place of its guess."""
        _say(f"nothing is recorded: {why}")
        from aorta.records.run_files import NOTE_FILE

        with suppress(OSError), (Path(self._folder) / NOTE_FILE).open("r+") as note:
            what, *because = note.read().splitlines()
            reasons = [line for line in because if line.startswith("aorta: ")]
            note.seek(0)
            note.write("\n".join([what, *reasons, f"aorta: {printable(why)}", ""]))
            note.truncate()

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
        for end in self._observed:
            end()
        in_flight = sys.exc_info()[1]
        recording.close(error or (None if in_flight is self._handled else in_flight))
        if self._others - (self._usual_others or set()) and _rank() == 0:
            _say("later steps, of another optimizer, are not recorded: one training per process is")


def wrapped(model: nn.Module | None) -> Iterator[nn.Module]:
    """Yield a model, and what it wraps: that of DistributedDataParallel, that of `torch.compile`."""
    while model is not None:
        yield model
        inner = model._modules.get("module")  # asked for None, as a module without len() has no truth
        model = model._modules.get("_orig_mod") if inner is None else inner


def trained_models(optimizer: Optimizer) -> list[nn.Module]:
    """Return the outermost modules that hold parameters of any optimizer. Where none does, as an optimizer of flat
    partitions (DeepSpeed's) has parameters of its own: those that can be trained.
    """
    import torch

    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), (torch.nn.Module, torch.optim.Optimizer))]
    groups = [group for thing in (*alive, optimizer) for group in getattr(thing, "param_groups", ())]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    modules = [thing for thing in alive if isinstance(thing, torch.nn.Module) and "_modules" in thing.__dict__]
    inner = {id(child) for module in modules for child in module._modules.values()}
    outermost = [module for module in modules if id(module) not in inner]
    holding = [thing for thing in outermost if any(id(parameter) in trained for parameter in thing.parameters())]
    return holding or [
        thing for thing in outermost if thing.training and any(p.requires_grad for p in thing.parameters())
    ]


def steps_made(optimizer: Optimizer) -> int | None:
    """Return how many steps an optimizer has made, those before a resume too; None where it does not count them."""
    counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    return int(max(counts)) or None if counts else None


def _say(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # a closed terminal, or no stream at all
        sys.stderr.write(f"aorta: {printable(text)}\n")
        sys.stderr.flush()


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


_zero = _ZeroLines()


class _Leaving:
    """Goes with the SystemExit of a `sys.exit`. Where a script catches that, it dies below a frame of the script; where
    none does, the interpreter drops it when all frames have gone, before it ends.
    """

    def __init__(self, status: object) -> None:
        self._status, self._note = status, _zero.exits

    def __del__(self, frame: Callable[[int], object] = sys._getframe) -> None:
        try:
            frame(1)
        except ValueError:
            self._note(self._status)


@not_compiled
def _mode_noted(module: nn.Module, mode: bool = True) -> None:
    """Note where a model is put into evaluation mode, which `Module.eval` does by `train`."""
    if not mode:
        _zero.guarded(_zero.evaluates, module)


@not_compiled
def _exit_noted(*_: object) -> Callable[[bool], None]:
    """Note whether the program ends by a `sys.exit`."""

    @not_compiled
    def leaves(_returned: bool) -> None:
        if isinstance(error := sys.exc_info()[1], SystemExit):
            error.__dict__["_aorta"] = _Leaving(error.code)

    return leaves


def _call_before(owner: Any, name: str, do: Callable[..., None]) -> None:
    """Have AORTA called in front of a function of `owner`, with its arguments."""

    @not_compiled
    def before(*args: Any, **kwargs: Any) -> None:
        _zero.guarded(do, *args, *kwargs.values())

    setattr(owner, name, put_around(getattr(owner, name), before))


def _without_hooks(model: nn.Module, *_args: Any, **_named: Any) -> Callable[[bool], None]:
    from aorta.instrument.module_hooks import taken_out

    return taken_out(model)


def patch(module: ModuleType) -> None:
    """Put calls of AORTA around what scripts call of one of torch's modules, which has just been executed."""
    target: Any = module
    match module.__name__:
        case "torch.optim.optimizer":
            hook_optimizers()
            hooked = target.Optimizer.profile_hook_step  # makes the `step` of every class of optimizers
            target.Optimizer.profile_hook_step = staticmethod(lambda step: _zero.expect(hooked(step)))
            sys.exit = put_around(sys.exit, _exit_noted)
        case "torch.nn.modules.module":
            target.Module.train = put_around(target.Module.train, _mode_noted)
        case "torch.jit._recursive":
            target.create_script_module = put_around(target.create_script_module, _without_hooks)
        case "torch.serialization":
            _call_before(target, "save", _zero.saves)
        case "torch.amp.grad_scaler":  # whose step may leave out that of the optimizer
            target.GradScaler.step = _zero.around_step(target.GradScaler.step, 1)
        case "torch.distributed.distributed_c10d":
            _call_before(target, "barrier", partial(_zero.interrupt, "a barrier"))
            _call_before(target, "destroy_process_group", _zero.end)
        case "torch.distributed.checkpoint.state_dict_saver":
            for name in ("save", "async_save"):
                _call_before(target, name, partial(_zero.interrupt, "a checkpoint"))
        case "deepspeed.runtime.engine":
            target.DeepSpeedEngine.step = _zero.around_step(target.DeepSpeedEngine.step, 0, engine=True)
