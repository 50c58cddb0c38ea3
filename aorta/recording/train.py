"""Training, recorded: one attempt of one rank, from its configuration to a footer that says why it ended.

Must not compute a metric, or lose what was measured when something goes wrong.
"""

from __future__ import annotations

import itertools
import logging
import re
import shlex
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from aorta.command_line import shown_path
from aorta.config.fabric import emulated_ranks
from aorta.config.loop import planned_faults
from aorta.config.parallel import data_parallel_size
from aorta.config.resolve import Resolved, steps_planned
from aorta.config.schema import EmulatedFabric, Sharing, Wording
from aorta.distributed.output_folder import RUN_ID_FILE, RequestedConfig, RunFolder, occupied, prepare
from aorta.distributed.peers import Peers, StopAgreement, stop_on_signals
from aorta.distributed.topology import Topology, backend_for, platform_of
from aorta.errors import SIGNAL_EXIT_BASE, ConfigError, TracesIncomplete
from aorta.instrument.emulation.network import EmulatedNetwork, shared_folder
from aorta.instrument.emulation.stand_in import emulated_ranks as backend_of_ranks
from aorta.profiling.profiler_plan import Counters
from aorta.profiling.window_recording import StepMarkers
from aorta.recording.calibration import calibration_plan
from aorta.recording.isolated_baselines import run_baselines
from aorta.recording.live_steps import ShownStep, progress_of, refuse_missing_clients
from aorta.recording.loop_profiler import LoopProfiler
from aorta.recording.rank_process import EVERY_RANK, log_to, run_rank
from aorta.recording.recorded_run import RunRequest, RunSite, recorded_run
from aorta.recording.train_step import SpreadModel, TrainStep
from aorta.records.clocks import trace_metadata
from aorta.records.files import read_small
from aorta.records.schema import Step
from aorta.records.step_line import StepFacts
from aorta.workload import task_of
from aorta.workload.faults import injected_faults
from aorta.workload.tasks import Batch, Batches

_log = logging.getLogger(__name__)
_CHECKPOINT = re.compile(r"^step_(\d+)$")


def run_training(resolved: Resolved) -> int:
    """Train on this rank, and return the process's exit code; raises as `run_rank` does."""
    return run_rank(resolved, lambda *site: TrainingRun(*site).run(), leave_together=True)


class TrainingRun:
    """One training, while its process group is open."""

    def __init__(self, resolved: Resolved, topology: Topology, device: torch.device, peers: Peers) -> None:
        self.resolved, self.config = resolved, resolved.config
        self.topology, self.device, self.peers = topology, device, peers
        self.ranks = emulated_ranks(self.config.fabric) or topology.world_size
        self.task = task_of(self.config)
        training, dataset = self.config.training, self.config.dataset
        # Samples of a step, of all ranks together.
        self.samples = (
            training.batch_size * training.gradient_accumulation * data_parallel_size(self.config, self.ranks)
        )
        self.profiler = LoopProfiler(
            self.config.profiling,
            root=Path(self.config.training.output_dir),
            run_name=self.config.label or platform_of(device),
            counters=Counters(dataset.num_samples // self.samples, self.samples, dataset.sequence_length),
        )

    def run(self) -> signal.Signals | None:
        """Train; returns the signal that ended it early, if any."""
        is_announced = self.config.training.progress is Wording.tutorial
        if is_announced:
            _log.info("[rank %d] starting worker", self.topology.rank, extra=EVERY_RANK)
        with ExitStack() as stack:
            base = Path(self.config.training.output_dir) / (self.config.label or "")
            folder = stack.enter_context(occupied(base, self.topology, self.peers))
            # Rank 0 looks before any folder is moved; ranks that disagreed would wait for each other.
            answer: list[Any] = [0, None]
            if self.topology.rank == 0:
                try:
                    answer[0] = first_step(folder.checkpoints, self.config.training.start_step, folder.run_id)
                except (ConfigError, OSError) as error:
                    answer[1] = str(error)
            first, refused = self.peers.from_first_rank("first_step", answer)
            if refused:
                raise ConfigError(refused)
            self.profiler.check(self.topology, self.peers, resuming=first > 0)
            wanted = [logger.value for logger in self.config.telemetry.loggers]
            refuse_missing_clients(wanted, self.peers, "telemetry.loggers")
            overwrite = self.config.training.overwrite
            prepare(folder, self.topology, self.peers, overwrite=overwrite, resuming=first > 0)
            stack.enter_context(log_to(folder.log(self.topology.rank)))
            for note in self.resolved.notes if self.topology.rank == 0 else ():
                _log.warning(note)
            try:
                stopped_by = self._train(stack, folder, first)
            except Exception:
                _log.debug("rank %d failed", self.topology.rank, exc_info=True)  # while the log file is open
                raise
            if is_announced:
                _log.info("[rank %d] finished worker", self.topology.rank, extra=EVERY_RANK)
            return stopped_by

    def _train(self, stack: ExitStack, folder: RunFolder, first: int) -> signal.Signals | None:
        config, topology = self.config, self.topology
        stop = steps_planned(config, self.ranks)
        fabric = self._fabric(stack)
        if emulated_ranks(config.fabric) is not None:
            assert fabric is not None  # it has the ranks
            stack.enter_context(backend_of_ranks(fabric, self.device))
            fabric = None  # the backend delays its collectives itself
        model = SpreadModel(self.task, config, self.device)
        request = self._request(model, first, stop)
        run = stack.enter_context(recorded_run(request, RunSite(folder, topology, self.device, self.peers)))
        shown, alone = topology.rank == 0, self.ranks == 1
        progress = progress_of(config.training, first, stop, self.samples, shown=shown, alone=alone)
        stack.callback(progress.close)

        def show(step: Step | ShownStep) -> None:
            if step.phase == "train":
                progress.show(step)

        with run.record.starting():
            instrument = stack.enter_context(run.instrument(fabric=fabric, then=show if shown else None))
            step = TrainStep(model, self.task, instrument, config, self.device)
            interval, checkpoints = config.training.checkpoint_interval, None
            if first or interval:
                from aorta.recording.checkpoint import Checkpoints  # loads torch's package, which takes a second

                checkpoints = Checkpoints(
                    folder.checkpoints, folder.run_id, step.model.module, step.optimizer, step.schedule, step.scaler
                )
            if first and checkpoints is not None:
                checkpoints.load(first)
                _log.info("resumed from %s before step %d", folder.checkpoints / f"step_{first}", first)
        agreement = StopAgreement(self.peers.store, topology.rank, topology.world_size)
        stack.callback(agreement.close)
        # Signals outermost: a launcher ends the survivors of a dead rank while they still record which one it was.
        closed = run.record.closed_by(instrument, lambda: agreement.stopped_by)
        with stop_on_signals(agreement.request), closed:
            batches = self.task.batches(step.model.data_rank, step.model.data_size, self.device)
            markers, trained = StepMarkers(config.profiling.nvtx), 0
            shape = step.model.facts.get("mesh", {})
            clocks = trace_metadata(run.clocks.result, topology.rank)
            profiler = self.profiler.begin(first, folder.traces(topology.rank).parent, shape, clocks)
            stack.enter_context(profiler)
            planned = planned_faults(config.fault)
            faults = stack.enter_context(injected_faults(planned, topology.rank, step.model.module, run.progress.phase))
            for facts, source in self._steps(first, stop, request.warmup_steps, step.schedule, batches):
                if not agreement.may_start(facts.global_step):
                    break
                faults.begin(facts.global_step)
                run.calibrator.before(facts.global_step)
                with markers.iteration(facts.global_step), profiler.iteration(facts.global_step):
                    step.run(faults.batches(source), facts)
                run.calibrator.after(facts.global_step)
                with run.progress.phase("trace"):
                    profiler.step()
                trained += 1
                if checkpoints is not None and interval and (facts.global_step + 1) % interval == 0:
                    with run.progress.phase("checkpoint"):
                        checkpoints.save(facts.global_step + 1)
            run.progress.enter("closing")
            run.calibrator.close()
            if config.baseline.enabled and instrument.why_off is not None:
                _log.warning("baseline=true: no baseline steps: %s", instrument.why_off)
            elif config.baseline.enabled and trained:
                profiler.close()
                progress.close()
                run.progress.enter("baseline")
                # Their step numbers continue the training's: the ranks agree on the last one.
                numbers, steps = itertools.count(stop), config.baseline.steps

                def may_start() -> bool:
                    self.peers.raise_if_peer_failed()
                    return agreement.may_start(next(numbers))

                run_baselines(step, batches.for_ever, may_start, steps, self._warmup(steps))
        run.progress.enter("closing")
        progress.close()
        # After the footer, as it waits for late ranks. After a signal there is no time for that.
        in_place = run.record.writer.is_in_place
        if agreement.stopped_by is None:
            run.clocks.at_end(write=in_place)
        else:
            run.progress.exit_code = SIGNAL_EXIT_BASE + agreement.stopped_by
            run.loggers.hurry()
        ended = "completed" if agreement.stopped_by is None else "signal"
        if in_place:
            _log.info("%s: %d steps, record in %s", ended, trained, folder.path)
        else:
            _log.warning("%s: %d steps, but %s was removed, renamed or replaced meanwhile", ended, trained, folder.path)
        try:
            self.profiler.settle(folder, stopped=agreement.stopped_by is not None)
        except TracesIncomplete as error:
            run.record.refused(error.exit_code, str(error))
            raise
        if topology.rank == 0 and in_place:
            path = shlex.quote(shown_path(folder.path))
            _log.info("Next: aorta report %s", path)
            windows = self.profiler.saved_traces if config.profiling.enabled else []
            trace = next((path for _, paths in reversed(windows) for path in paths if path is not None), None)
            if trace is not None and trace.name.endswith((".json", ".json.gz")):
                _log.info("Next: https://ui.perfetto.dev, Open trace file: %s", shown_path(trace))
                if topology.world_size > 1:
                    _log.info("Next: all ranks on one clock: aorta merge %s -o merged.json.gz", path)
        return agreement.stopped_by

    def _warmup(self, steps: int) -> int:
        """Return how many of `steps` steps are flagged as warm-up (W21)."""
        return max(0, min(self.config.telemetry.warmup_steps, steps // 2))

    def _steps(
        self, first: int, stop: int, warmup: int, schedule: torch.optim.lr_scheduler.LambdaLR, batches: Batches
    ) -> Iterator[tuple[StepFacts, Iterator[Batch]]]:
        """Yield the facts of each step, and the source of its micro-batches."""
        for epoch in itertools.count():
            begin = max(first - epoch * batches.steps_per_epoch, 0)
            source = batches.epoch(epoch, begin)
            for step in range(begin, batches.steps_per_epoch):
                global_step = epoch * batches.steps_per_epoch + step
                if global_step >= stop:
                    return
                yield (
                    StepFacts(epoch, step, global_step, float(schedule.get_last_lr()[0]), global_step - first < warmup),
                    source,
                )

    def _fabric(self, stack: ExitStack) -> EmulatedNetwork | None:
        settings = self.config.fabric
        if not isinstance(settings, EmulatedFabric):
            return None
        if platform_of(self.device) == "other":
            raise ConfigError(
                f"fabric=emulated: cannot delay collectives on {self.device.type}: torch has a kernel that just waits "
                "for CUDA and HIP only; use fabric=none, or training.device=cpu"
            )
        if settings.ranks is None and self.device.type != "cpu":
            raise ConfigError(
                f"fabric=emulated: on {self.device.type} only one process that stands for all ranks delays "
                f"collectives; set fabric.ranks={self.topology.world_size} and start one, or use training.device=cpu"
            )
        if settings.sharing is Sharing.link and self.device.type != "cpu":
            raise ConfigError(
                f"fabric.sharing=link: on {self.device.type} each process group delays its own stream, so groups "
                "cannot take turns; use fabric.sharing=group, or training.device=cpu"
            )
        folder = stack.enter_context(shared_folder(self.peers)) if settings.ranks is None else None
        return EmulatedNetwork(settings, self.topology.rank, self.ranks, folder)

    def _request(self, model: SpreadModel, first: int, stop: int) -> RunRequest:
        config = self.config
        plan = {
            "strategy": config.parallel.strategy,
            "parameters": sum(p.numel() for p in model.parallelized.module.parameters()),
            **model.parallelized.facts,
        }
        copies = 0 if config.dataset.on_device else 1
        return RunRequest(
            RequestedConfig(config.label, self.resolved.plain, self.resolved.manifest_hash),
            config.clock,
            config.telemetry,
            config.instrument,
            backend=backend_for(self.device, emulated_ranks(config.fabric)),
            parallel=config.parallel.strategy,
            plan=plan,
            start_step=first,
            warmup_steps=self._warmup(stop - first),
            emulated_fabric=isinstance(config.fabric, EmulatedFabric),
            emulated_ranks=emulated_ranks(config.fabric),
            ranks_per_device=config.training.ranks_per_device,
            own_streams=Counter(model.parallelized.streams) + Counter({0: copies}),
            facts={"steps_planned": stop, **self.profiler.facts()},
            samples_per_step=self.samples,
            calibration=calibration_plan(
                config.instrument.calibration,
                self.device,
                config.instrument.mode.value,
                first,
                self._warmup(stop - first),
                stop,
                self.profiler.profiles(first),
            ),
            watchdog=config.watchdog,
            profiled=self.profiler.profiles(first),
        )


def available(folder: Path) -> list[int]:
    """Return the steps for which `folder` has a complete checkpoint, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _CHECKPOINT.match(path.name)))


def first_step(folder: Path, wanted: int | None, run_id: str) -> int:
    """Return where training begins: after a restart at the newest checkpoint of this run, or as configured, or at 0.
    Nobody else may use the folder: a checkpoint that a killed run was about to replace gets its name back.

    Args:
        folder: of the checkpoints, which may hold an earlier run's, with larger numbers.
        wanted: `training.start_step`.
        run_id: of this run; a restart has that of the attempts before it.

    Raises:
        ConfigError: there is no checkpoint of the configured start step. OSError: the folder cannot be read.
    """
    for old in folder.glob("step_*.old"):
        if not old.with_suffix("").exists():
            old.rename(old.with_suffix(""))
    steps, ours = available(folder), []
    for step in steps:
        with suppress(OSError):  # it does not say whose it is
            if read_small(folder / f"step_{step}" / RUN_ID_FILE).decode(errors="replace") == run_id:
                ours.append(step)
    if ours:
        return max(ours)
    if wanted is None or wanted == 0:
        return 0
    if wanted not in steps:
        raise ConfigError(
            f"training.start_step={wanted}: no checkpoint {folder}/step_{wanted}; there are: "
            f"{', '.join(map(str, steps)) or 'none'}. training.checkpoint_interval=K takes one every K steps"
        )
    return wanted
