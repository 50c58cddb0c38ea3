"""One attempt of one rank: build, wire, loop, and close the record with a footer that says why it ended.

Must not: handle what went wrong (that is `run`); it only makes sure that nothing measured is lost.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aorta.capture.devices.sampler import DeviceSampler
from aorta.capture.markers import StepMarkers
from aorta.config.resolve import Resolved, steps_planned
from aorta.config.schema import Compile, Config, EmulatedFabric, Mode
from aorta.errors import ConfigError
from aorta.instrument.arrivals import meeting_place
from aorta.instrument.fabric import Fabric
from aorta.instrument.instrument import Instrument
from aorta.instrument.native.build import host_tap
from aorta.instrument.reading import StepFacts
from aorta.instrument.recorder import TOGETHER
from aorta.instrument.seam import all_groups
from aorta.launch.clock_sync import ClockSynchronisation
from aorta.launch.knobs import Knob, knobs_found
from aorta.launch.peers import Peers
from aorta.launch.process_group import backend_for
from aorta.launch.provenance import Asked, build_manifest, rank_facts
from aorta.launch.run_folder import CHECKPOINT_DIR, RunFolder, began_unix_s, prepare
from aorta.launch.stopping import StopAgreement, stop_on_signals
from aorta.launch.topology import Topology, platform_of
from aorta.parallel.plan import Blocks, Spread
from aorta.parallel.strategies import spread
from aorta.runner.checkpoint import Checkpoints, first_step
from aorta.runner.isolated_baselines import Baselines
from aorta.runner.logs import log_to
from aorta.runner.optimization import make_optimizer, make_scaler, make_schedule
from aorta.runner.profiler_traces import Traces
from aorta.runner.progress_display import announced, progress_of
from aorta.runner.rank_record import Record, header_of, publish_manifest
from aorta.runner.recorded_run import device_sampler
from aorta.runner.train_step import TrainStep
from aorta.telemetry.clock_sync import ClockSync
from aorta.telemetry.schema import Step
from aorta.workload.task import Batch, Batches, Model
from aorta.workload.tasks import task_of

_log = logging.getLogger(__name__)


class Training:
    """Everything between an open process group and its end."""

    def __init__(self, resolved: Resolved, topology: Topology, device: torch.device, peers: Peers) -> None:
        self.resolved, self.config = resolved, resolved.config
        self.topology, self.device, self.peers = topology, device, peers
        self.task = task_of(self.config)
        self.traces = Traces(self.config, topology, platform_of(device), peers)

    def run(self) -> signal.Signals | None:
        """Train; returns the signal that ended it early, if one did."""
        with ExitStack() as stack, announced(self.config.training.progress, self.topology.rank):
            self.traces.check()
            base = Path(self.config.training.output_dir) / (self.config.label or "")
            first = self._first_step(base)
            folder = prepare(
                base, self.topology, self.peers, overwrite=self.config.training.overwrite, resuming=first > 0
            )
            stack.enter_context(log_to(folder.log(self.topology.rank)))
            for note in self.resolved.notes if self.topology.rank == 0 else ():
                _log.warning(note)
            try:
                return self._train(stack, folder, first)
            except Exception:
                _log.debug("rank %d failed", self.topology.rank, exc_info=True)  # while the log file is open
                raise

    def _first_step(self, base: Path) -> int:
        """As rank 0 finds it: it reads before anything is moved, and ranks that disagreed would wait for each other."""
        answer: list[Any] = [0, None]
        if self.topology.rank == 0:
            try:
                began = began_unix_s(base, self.topology)
                answer[0] = first_step(base / CHECKPOINT_DIR, self.config.training.start_step, began)
            except ConfigError as error:
                answer[1] = str(error)
        first, refused = self.peers.from_rank_zero("first_step", answer)
        if refused:
            raise ConfigError(refused)
        return int(first)

    def _train(self, stack: ExitStack, folder: RunFolder, first: int) -> signal.Signals | None:
        config, topology = self.config, self.topology
        stop = steps_planned(config, topology.world_size)
        warmup = _warmup(config, stop - first)
        model, blocks = self._model()
        model_spread = spread(model, blocks, model.tensor_parallel_parts(), config, self.device)
        # Ranks begin alike but drop out differently, except where they compute a layer together.
        torch.manual_seed(config.training.seed + 1 + model_spread.data_rank)
        clocks = ClockSynchronisation(config.clock, self.peers, topology, folder)
        devices = device_sampler(config.telemetry, self.device)
        self._manifest(folder, model_spread, clocks.at_start(), devices)
        record = self._record(stack, folder, first, warmup, devices)
        progress = progress_of(config.training, first, stop, shown=topology.rank == 0)
        stack.callback(progress.close)

        stack.enter_context(devices)

        def finished(step: Step) -> None:
            record.step(devices.onto(step), config.clock.anchor_interval)
            if step.phase == "train":
                progress.show(step)

        with record.starting(self.peers.explain):
            instrument = stack.enter_context(
                Instrument(
                    self.device,
                    record.header.instrument_mode,
                    topology.rank,
                    topology.world_size,
                    record.header.clock,
                    finished,
                    config.instrument.stream_priority,
                    self._fabric(stack),
                    native=config.instrument.native,
                    together=TOGETHER,
                )
            )
            loss = self.task.loss()
            instrument.watch([*blocks, ("loss", loss)])
            instrument.watch_backward(loss)
            optimizer = make_optimizer(model.parameters(), self.task)
            schedule, scaler = make_schedule(optimizer, config), make_scaler(config, self.device)
            checkpoints = Checkpoints(folder.checkpoints, model_spread.module, optimizer, schedule, scaler)
            if first:
                checkpoints.load(first)
                _log.info("resumed from %s before step %d", folder.checkpoints / f"step_{first}", first)
            step = TrainStep(model_spread, loss, optimizer, schedule, scaler, instrument, config, self.device)
        agreement = StopAgreement(self.peers.store, topology.rank, topology.world_size)
        stack.callback(agreement.close)
        # Signals outermost: a launcher ends the survivors of a dead rank while they still write down who it was.
        with stop_on_signals(agreement) as signals, record.closed_by(instrument, self.peers.explain) as ending:
            batches = self.task.batches(model_spread.data_rank, model_spread.data_size, self.device)
            markers, trained = StepMarkers(config.profiling.nvtx), 0
            profiler = self.traces.open(folder, model_spread.facts.get("mesh", {}), first)
            stack.enter_context(profiler)
            for facts, source in self._steps(first, stop, warmup, schedule, batches):
                if not agreement.may_start(facts.global_step):
                    break
                with markers.iteration(facts.global_step), profiler.iteration(facts.global_step):
                    step.run(source, facts)
                profiler.step()
                trained += 1
                interval = config.training.checkpoint_interval
                if interval and (facts.global_step + 1) % interval == 0:
                    checkpoints.save(facts.global_step + 1)
            if config.baseline.enabled and trained:
                profiler.close()
                progress.close()
                # Numbered on from the training's, for the agreement of the ranks on the last step.
                numbers, steps = itertools.count(stop), config.baseline.steps

                def may_start() -> bool:
                    self.peers.go_on()
                    return agreement.may_start(next(numbers))

                Baselines(step, batches.for_ever, may_start, steps, _warmup(config, steps)).run()
            ending.signal = signals.received
        progress.close()
        # Behind the footer: it waits for ranks that are late. After a signal there is no time for that.
        if ending.signal is None:
            clocks.at_end()
        self.traces.settle(profiler, folder, stopped=signals.received is not None)
        _log.info("%s: %d steps, record in %s", ending.reason, trained, folder.path)
        return signals.received

    def _steps(
        self, first: int, stop: int, warmup: int, schedule: torch.optim.lr_scheduler.LambdaLR, batches: Batches
    ) -> Iterator[tuple[StepFacts, Iterator[Batch]]]:
        """The facts of each step, and where its micro-batches come from."""
        for epoch in range(self.config.training.epochs):
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

    def _model(self) -> tuple[Model, Blocks]:
        """The model on its device, the same on every rank, and its blocks; compiled where asked."""
        torch.manual_seed(self.config.training.seed)
        model = self.task.model().to(self.device)
        blocks = list(model.blocks())
        if self.config.compile.enabled:
            for _, block in blocks:
                _compile(block, self.config.compile)
        return model, blocks

    def _fabric(self, stack: ExitStack) -> Fabric | None:
        """The emulated fabric, where one was asked for."""
        settings = self.config.fabric
        if not isinstance(settings, EmulatedFabric):
            return None
        if platform_of(self.device) == "other":
            raise ConfigError(
                f"fabric=emulated: delays on {self.device.type} cannot be emulated: torch has a kernel that only takes "
                "time for CUDA and HIP alone; use fabric=none, or training.device=cpu"
            )
        folder = stack.enter_context(meeting_place(self.peers))
        return Fabric(settings, self.topology.rank, self.topology.world_size, folder)

    def _knobs(self, model: Spread) -> list[Knob]:
        """Settings of the environment that get in the way of this run."""
        groups = len(all_groups())
        streams = 1 + model.streams + groups  # compute, the strategy's, the backend's
        looking = self.config.instrument.mode is not Mode.off
        if looking:
            streams += groups  # ours
        if not self.config.dataset.on_device:
            streams += 1  # copies to the device
        return knobs_found(os.environ, platform_of(self.device), streams, timing_events=looking)

    def _manifest(self, folder: RunFolder, model: Spread, clocks: ClockSync | None, devices: DeviceSampler) -> None:
        facts = rank_facts(self.topology, self.device, devices.facts())
        asked, emulated = self.config.instrument, isinstance(self.config.fabric, EmulatedFabric)
        facts |= host_tap(self.device, asked.mode.value, wanted=asked.native, emulated=emulated)
        ranks = self.peers.gather("facts", facts)
        knobs = self._knobs(model)
        for knob in knobs if self.topology.rank == 0 else ():
            _log.log(knob.level, knob.text)
        plan = {
            "strategy": self.config.parallel.strategy,
            "parameters": sum(p.numel() for p in model.module.parameters()),
            **model.facts,
        }
        backend = backend_for(self.device)
        publish_manifest(
            folder,
            self.peers,
            lambda: {
                **build_manifest(self._asked(), folder, self.topology, self.device, backend, ranks, plan),
                "clock_sync": clocks and clocks.summary(),
                **self.traces.facts(),
                "warnings": [knob.text for knob in knobs],
            },
        )

    def _record(self, stack: ExitStack, folder: RunFolder, first: int, warmup: int, devices: DeviceSampler) -> Record:
        header = header_of(
            self._asked(),
            folder,
            self.topology,
            self.device,
            backend=backend_for(self.device),
            parallel=self.config.parallel.strategy,
            mode=self.config.instrument.mode.value,
            start_step=first,
            warmup_steps=warmup,
            device_telemetry=devices.header,
        )
        record = Record.open(folder, self.peers, header)
        stack.callback(record.writer.close)
        return record

    def _asked(self) -> Asked:
        return Asked(self.config.label, self.resolved.plain, self.resolved.manifest_hash)


def _warmup(config: Config, steps: int) -> int:
    """How many of so many steps are flagged as warm-up (W21)."""
    return max(0, min(config.telemetry.warmup_steps, steps // 2))


def _compile(block: nn.Module, settings: Compile) -> None:
    """Compile a block's forward in place; its hooks stay outside, so ranges and sharding are not traced."""
    # Dynamo would split graphs at DDP's buckets; blocks are smaller than those already.
    torch._dynamo.config.optimize_ddp = False
    block.forward = torch.compile(
        block.forward,
        backend=settings.backend,
        mode=settings.mode,
        fullgraph=settings.fullgraph,
        dynamic=settings.dynamic,
    )
