"""`aorta.record` and `aorta.start`: record a run around a training loop that AORTA did not write.

Its folder has the same content as that of `train.py`: `run.json` and a record per rank, from a header to a footer that
says why the block ended. Must not change what is trained, handle a signal that the program or the system uses,
configure logging, or leave anything installed on exit.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from aorta.command_line import to_stderr
from aorta.config.loop import Watchdog, number_rules
from aorta.config.resolve import hash_of
from aorta.config.schema import Clock, Devices, Loggers, Mode, Telemetry, Training
from aorta.config.schema import Instrument as InstrumentSettings
from aorta.distributed.output_folder import CHECKPOINT_DIR, RequestedConfig, occupied, prepare
from aorta.errors import AortaError, ConfigError, TracesIncomplete
from aorta.instrument.module_hooks import ModuleHook
from aorta.instrument.recorder import Recorder
from aorta.instrument.transparent import not_compiled, observed_loading, observed_steps
from aorta.loggers import Logger
from aorta.recording.api_arguments import (
    called_around,
    checked_config,
    chosen_blocks,
    compiled_in_place,
    device_of,
    find_blocks,
    outside_compiled,
    strategy_of,
)
from aorta.recording.calibration import calibration_plan
from aorta.recording.live_steps import described, refuse_missing_clients
from aorta.recording.meeting import joined
from aorta.recording.open_recording import Recording
from aorta.recording.profilers import Profiling, profiler_of
from aorta.recording.rank_process import meet
from aorta.recording.rank_record import exit_code_of
from aorta.recording.recorded_run import RunRequest, RunSite, recorded_run
from aorta.records.clocks import trace_metadata
from aorta.records.progress import Progress
from aorta.records.schema import InstrumentMode
from aorta.timeline.overlap import Unseen

_log = logging.getLogger(__name__)
_one_at_a_time = threading.Lock()
standing_aside: list[Callable[[], None]] = []
"""What ends an open recording of `aorta record`, where the program begins one of its own."""


@contextmanager
def record(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | Sequence[nn.Module],
    blocks: Iterable[str | nn.Module] | None = None,
    label: str | None = None,
    workload: Mapping[str, Any] | None = None,
    parallel: str | None = None,
    mode: InstrumentMode = "dedicated",
    warmup_steps: int = Telemetry().warmup_steps,
    start_step: int = 0,
    stream_priority: int | None = InstrumentSettings().stream_priority,
    timeout_s: float = Training().timeout_s,
    devices: str = Telemetry().devices.name,
    profiling: Profiling | None = None,
    loggers: Sequence[str | Logger] = (),
    logger_interval: int = Telemetry().logger_interval,
    calibration: str | int = InstrumentSettings().calibration,
    every: str | int = InstrumentSettings().every,
    watchdog_timeout_s: float | None = Watchdog().timeout_s,
) -> Iterator[Recording]:
    """Record the training inside the `with` block, on every rank of the default process group (or in one process).

    Call it on all ranks, after the model has been wrapped (DDP, FSDP, ...) and moved to its device. An earlier run in
    `folder` is moved to `folder/history/`.

    Args:
        folder: of this run alone; relative to the current directory.
        model: what is called in the forward pass; a list where several are trained (`[generator, discriminator]`).
        blocks: modules whose compute is timed, by name or themselves; None: by the rule in
            `aorta.recording.api_arguments`.
        label: the run's name in its record, traces and loggers; None: the platform (cpu, cuda, rocm, ...).
        workload: what is trained, for the manifest (JSON types); comparisons name differences.
        parallel: the strategy's name, for the record ("ddp", "fsdp", ...); None: that of a DDP or FSDP wrapper.
        mode: "dedicated", "observe" or "off" (docs/dev/measuring.md, R2 and R3).
        warmup_steps: first steps that reports leave out (W21).
        start_step: global step of the first one, after a resume.
        stream_priority: of dedicated streams on an accelerator; None: of the stream a collective was issued on.
        timeout_s: seconds that one rank waits for the others to begin recording.
        devices: source of device samples (temperature, power, clocks), as `telemetry.devices`; "off": none.
        profiling: windows of torch.profiler beside the record: an `aorta.Profiler` or `aorta.TorchProfiler` that has
            not been started, the name of a preset ("aorta", "d9d", "tutorial", "composer"), or a mapping of the
            profiling group's keys, `preset` among them. Traces of the latter two go to `torch_profiler/` in `folder`
            (of "composer" to `<label>/torch_traces/`), after a resume beside the earlier ones.
        loggers: what gets the scalars of rank 0's steps while the loop runs: names as in `telemetry.loggers`, or
            objects with the methods of `aorta.Logger`.
        logger_interval: steps from one that is logged to the next.
        calibration: steps after the warm-up that are also measured by torch.profiler's kernels, as
            `instrument.calibration`: "auto", "off", or a number. A profiler of your own that runs then comes first.
        every: of how many steps one is observed, as `instrument.every`: a number, or "auto", with which AORTA's own
            work takes 0.1 % of the training thread's time, or it warns.
        watchdog_timeout_s: seconds without progress after which an autopsy is written, as `watchdog.timeout_s`; None:
            learned from the run's steps; 0: no watchdog. Announce long pauses with `recording.pause()`.

    Raises:
        ConfigError: an argument is not allowed, a recording is open already, or the launcher's variables name ranks
            that are in no process group.
        PeerFailed: another rank did not start recording, or cannot write its record; it is named.
        RunIncomplete: the folder cannot be written.
        InstrumentError: this torch lacks what the interception needs.
        TracesIncomplete: at the end, with the record complete: a trace is missing or was not uploaded.
    """
    given = list(dict.fromkeys([model] if isinstance(model, nn.Module) else model))
    if not given or not all(isinstance(model_given, nn.Module) for model_given in given):
        raise ConfigError(f"aorta.record: model={model!r}: must be a module, or a list of modules")
    models = list(dict.fromkeys(map(called_around, given)))
    whole = models[0] if len(models) == 1 else nn.ModuleList(models)
    strategy, calibration, every = strategy_of(whole) if parallel is None else parallel, str(calibration), str(every)
    config = checked_config(
        label,
        workload,
        strategy,
        mode,
        warmup_steps,
        start_step,
        stream_priority,
        devices,
        loggers,
        logger_interval,
        calibration,
        every,
    )
    named_loggers = [logger for logger in loggers if isinstance(logger, str)]
    for broken in number_rules("watchdog", watchdog := Watchdog(timeout_s=watchdog_timeout_s)):
        raise ConfigError(f"aorta.record: {broken}")
    watched = find_blocks(*models) if blocks is None else chosen_blocks(blocks, *given)
    watched, why_others = outside_compiled(whole, watched)
    compiled = compiled_in_place(whole)
    hookable = [module for module in models if id(module) not in compiled]
    device = device_of(whole)
    profiler = profiler_of(profiling, Path(folder), label, timeout_s)
    with ExitStack() as stack:
        for stand_aside in standing_aside:
            stand_aside()
        if not _one_at_a_time.acquire(blocking=False):
            raise ConfigError("aorta.record: a recording is open in this process already; end it first")
        stack.callback(_one_at_a_time.release)
        stack.enter_context(NamedLines(logging.WARNING))
        topology, peers = meet(timeout_s)
        start_step = max(peers.gather("start step", start_step))  # a rank without optimizer state counts no steps
        profiler.check(topology, peers, resuming=start_step > 0)
        refuse_missing_clients(named_loggers, peers, "aorta.record: loggers")
        # Checkpoints in the folder are the caller's.
        run_folder = stack.enter_context(occupied(Path(folder), topology, peers))
        prepare(run_folder, topology, peers, overwrite=False, resuming=start_step > 0, keep=(CHECKPOINT_DIR,))
        backend = str(dist.get_backend_config()) if dist.is_initialized() else None
        reasons = {
            f"config.{name}": f"not known: give aorta.record({name}=...)"
            for name in ("workload", "parallel")
            if config[name] is None
        }
        if why_others is not None:
            reasons["plan.blocks"] = why_others
        meeting = joined.get()
        if meeting is not None and meeting.left_out:
            reasons["ranks"] = f"no optimizer step, so not recorded: ranks {meeting.left_out}"
        only_rank_0 = ("loggers", "logger_interval")
        of_all_ranks = {name: value for name, value in config["telemetry"].items() if name not in only_rank_0}
        profiled = profiler.profiles(start_step)
        request = RunRequest(
            RequestedConfig(label, config, hash_of({**config, "telemetry": of_all_ranks})),
            Clock(),
            Telemetry(
                devices=Devices[devices],
                loggers=[Loggers[name] for name in named_loggers],
                logger_interval=logger_interval,
            ),
            InstrumentSettings(Mode(mode), stream_priority, native=True, calibration=calibration, every=every),
            backend=backend,
            parallel=strategy or "unknown",
            plan={"blocks": [name for name, _ in watched], "parameters": sum(p.numel() for p in whole.parameters())},
            start_step=start_step,
            warmup_steps=warmup_steps,
            facts=profiler.facts(),
            remarks={"reasons": reasons},
            own_loggers=[logger for logger in loggers if not isinstance(logger, str)],
            calibration=calibration_plan(calibration, device, mode, start_step, warmup_steps, profiled=profiled),
            watchdog=watchdog,
            profiled=profiled,
            exit_code=_exit_code,
        )
        run = stack.enter_context(recorded_run(request, RunSite(run_folder, topology, device, peers)))
        if meeting is not None:
            meeting.until_held()
        run.record.may_end_early = True
        instrument = stack.enter_context(run.instrument())
        instrument.watch(watched)
        if why_others is not None:
            if not watched:
                instrument.recorder.unseen = Unseen(f"no block: {why_others}", compute=True)
            if peers.is_first:
                to_stderr(f"aorta: {why_others}")
        # The blocks too: where the last one's output is the model's, FSDP queues its callback with that gradient.
        for module in (*(block for _, block in watched), *hookable):
            instrument.watch_backward(module)
            del module
        stack.enter_context(marked_optimizers(instrument.recorder))  # before those that note the phase that follows
        stack.enter_context(marked_loading(instrument.recorder))
        stack.enter_context(noted_phases(hookable, run.progress))
        names = tuple(name for name, _ in watched)
        clocks = trace_metadata(run.clocks.result, topology.rank)
        stack.enter_context(profiler.begin(start_step, run_folder.traces(topology.rank).parent, metadata=clocks))
        recording = Recording(
            run_folder.path, names, instrument.recorder, start_step, warmup_steps, profiler, run.calibrator
        )
        recording.watched = tuple(map(weakref.ref, (*hookable, *(block for _, block in watched))))
        del model, blocks, given, models, whole, watched, hookable  # which the program may free
        leaving: SystemExit | None = None
        try:
            try:
                yield recording
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise
                leaving = error
            if os.getpid() != topology.pid:  # a forked child only takes off what it has of its parent's recording
                if leaving is not None:
                    raise leaving
                return
            run.progress.enter("closing")
            run.calibrator.close()
            recording._end()
            instrument.recorder.finish()
            run.record.complete(instrument)
        except BaseException as error:
            if os.getpid() != topology.pid:
                raise
            recording._end()
            run.record.fail(instrument, _exit_code(error), f"rank {topology.rank}: {described(error)}")
            profiler.abandon(error)  # after the footer, as it waits for files
            raise
        in_place = run.record.writer.is_in_place
        run.clocks.at_end(write=in_place)  # after the footer, which must not depend on what happens here
        if peers.is_first:
            to_stderr(recording.ended(run.record.writer.steps_written, in_place=in_place))
        try:
            profiler.settle(run_folder)
        except TracesIncomplete as error:
            run.record.refused(_exit_code(error), f"rank {topology.rank}: {described(error)}")
            raise
        if leaving is not None:
            raise leaving


class NamedLines(logging.Handler, AbstractContextManager["NamedLines"]):
    """Prints warnings of AORTA as logging does where nobody configured it, and whose they are."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            to_stderr(f"aorta: {record.getMessage()}")

    def __enter__(self) -> NamedLines:
        logging.getLogger("aorta").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("aorta").removeHandler(self)


@contextmanager
def marked_optimizers(recorder: Recorder) -> Iterator[None]:
    """Record every outermost optimizer step as `aux` for the length of a `with` block, unless it computes gradients (a
    closure) or runs in the backward pass.
    """
    outermost: list[tuple[torch.optim.Optimizer, AbstractContextManager[None]]] = []

    def begin(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if outermost and outermost[0][0] is optimizer:
            outermost.clear()  # its last step failed
        closure = named.get("closure") or (args[1] if len(args) > 1 else None)
        if not outermost and closure is None and torch._C._current_graph_task_id() == -1:
            outermost.append((optimizer, recorder.aux("optimizer")))
            outermost[0][1].__enter__()

    def end(optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _named: dict[str, Any]) -> None:
        if outermost and outermost[0][0] is optimizer:
            outermost.pop()[1].__exit__(None, None, None)

    with observed_steps(begin, end):
        yield


@contextmanager
def marked_loading(recorder: Recorder) -> Iterator[None]:
    """Record the time in `next()` of a DataLoader's iterator as `aux` for the length of a `with` block: on the thread
    that trains, and once where a loader takes its batches from another one, or the caller marks `data` itself.
    """
    failed = False

    def carefully(do: Callable[..., object], *args: Any) -> None:
        nonlocal failed
        try:
            do(*args)
        except Exception as error:  # noqa: BLE001  the batch is the caller's
            failed = True
            _log.warning("waiting for the DataLoader is no longer recorded: %s: %s", type(error).__name__, error)

    @not_compiled
    def before(*_: Any) -> Callable[[bool], None] | None:
        if failed or not recorder.lacks("data"):
            return None
        loading = recorder.aux("data")
        carefully(loading.__enter__)

        @not_compiled
        def after(returned: bool) -> None:
            kind = None if returned else sys.exc_info()[0]
            carefully(loading.__exit__, None if kind is StopIteration else kind, None, None)

        return None if failed else after

    with observed_loading(before):
        yield


@contextmanager
def noted_phases(models: Sequence[nn.Module], progress: Progress) -> Iterator[None]:
    """Note forward and backward passes of `models` and optimizer steps, for the length of a `with` block."""
    if progress.path is None:
        yield
        return

    def enter(phase: str) -> Callable[..., None]:
        def entered(*_: object) -> None:  # a hook's value would replace what it is given
            progress.enter(phase)

        return entered

    backward = enter("backward")

    def watch_output(_module: nn.Module, _inputs: object, output: object) -> None:
        first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)), None)
        if first is not None and first.requires_grad:
            first.register_hook(backward)  # type: ignore[no-untyped-call]

    hooks = [
        *(model.register_forward_pre_hook(ModuleHook(model, enter("forward"))) for model in models),
        *(model.register_forward_hook(ModuleHook(model, watch_output)) for model in models),
    ]
    del models
    try:
        with observed_steps(enter("optimizer"), enter("step")):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def start(folder: str | os.PathLike[str], *, model: nn.Module | Sequence[nn.Module], **arguments: Any) -> Recording:
    """Start a recording that `recording.close(error)` ends, for callbacks, where no `with` block fits.

        recording = aorta.start("artifacts/mine", model=model)
        ...  # recording.step() at the end of every step
        recording.close()

    One that is still open when the interpreter exits is closed then, with the exception that ended the program.

    Args:
        folder, model, arguments: as those of `record`.

    Raises:
        TypeError: `record` has no such argument. Others: as at the beginning of `record`.
    """
    context = record(folder, model=model, **arguments)
    recording = context.__enter__()
    recording._started = context
    # Not by atexit, which children of multiprocessing do not heed. A forked child does not call its parent's.
    recording._at_exit = Finalize(None, recording._close_at_exit, exitpriority=0)
    return recording


def _exit_code(error: BaseException) -> int:
    """Return the exit code of a program that ends with `error`: Python's own, also of errors of AORTA."""
    return 1 if isinstance(error, AortaError) else exit_code_of(error)
