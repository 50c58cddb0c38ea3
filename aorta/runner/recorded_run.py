"""Wires one run: clocks, device samples, manifest, header, record and instrumentation, in the order of their
dependencies.

Training (`train`), `aorta.record` (`api`), RPC runs (`aorta.rpc`) and the loop of checks and benchmarks (`train_step`)
all use it, so that runs which differ only in who drives them leave the same files. Must not know what is run: whatever
differs between runs is in a `RunRequest`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from aorta.config.resolve import Resolved
from aorta.config.schema import Clock, Mode, Telemetry, Watchdog
from aorta.config.schema import Instrument as InstrumentSettings
from aorta.device_metrics.sampler import DeviceSampler, open_source
from aorta.device_metrics.sources import identify
from aorta.distributed.clock_measurement import ClockSynchronisation
from aorta.distributed.cuda import mps_runs
from aorta.distributed.environment_checks import (
    EnvironmentWarning,
    cores,
    one_rank,
    setting_warnings,
    shared_device,
    streams_used,
    timed_from_python,
    too_many_ranks,
)
from aorta.distributed.output_folder import (
    RequestedConfig,
    RunFolder,
    build_manifest,
    occupied,
    prepare,
    rank_facts,
    write_manifest,
)
from aorta.distributed.peers import Peers
from aorta.distributed.topology import Topology, default_label, device_name, platform_of
from aorta.instrument.cpu_interceptor import slowest_of_host, stall_cutoff
from aorta.instrument.dispatcher import all_groups
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.native.build import ensure_built, interceptor_for
from aorta.loggers import Logger, Place
from aorta.records.clocks import boot_id, read_clocks
from aorta.records.progress_file import Progress
from aorta.records.run_files import MANIFEST_FILE
from aorta.records.schema import (
    SCHEMA_VERSION,
    STALL_CUTOFF_NS,
    CalibrationPlan,
    ClockReading,
    DeviceTelemetry,
    Header,
    InstrumentMode,
    Platform,
    StallCutoff,
    Step,
    Timer,
)
from aorta.runner.calibration import Calibrator
from aorta.runner.live_steps import LiveLoggers
from aorta.runner.rank_process import log_to
from aorta.runner.rank_record import RankRecordWriter
from aorta.runner.watchdog import noted_progress

_log = logging.getLogger(__name__)
open_runs: list[RunRequest] = []
"""Of this process."""
_TIMERS: dict[Platform, Timer] = {
    "cpu": "perf_counter",
    "cuda": "cuda_event",
    "rocm": "cuda_event",
    "other": "device_event",
}


@dataclass(frozen=True)
class RunSite:
    """Where a run takes place.

    Attributes:
        folder: agreed on by all ranks.
        topology: which rank this is.
        device: what this rank computes on.
        peers: communication with the other ranks.
    """

    folder: RunFolder
    topology: Topology
    device: torch.device
    peers: Peers


@dataclass(frozen=True)
class RunRequest:
    """Describes one recorded run: everything in its manifest and headers that does not follow from the machine.

    Attributes:
        asked: the label, the configuration and its hash.
        clock, telemetry, instrument: those groups of the configuration.
        backend: of torch.distributed; None where there is no process group.
        parallel: the strategy's name.
        plan: effective settings of the strategy, for the manifest.
        start_step: global step of the first one.
        warmup_steps: how many of the first steps are flagged as warm-up.
        emulated_fabric: whether the fabric is emulated.
        emulated_ranks: how many ranks the only process stands for; None where every rank is a process.
        ranks_per_device: how many ranks share an accelerator.
        own_streams: accelerator streams of the run itself besides the compute stream, by priority, counted by warnings
            about hardware queues.
        facts, remarks: further entries of the manifest, before and after the warnings.
        own_loggers: loggers of the caller, beside those that `telemetry` names.
        samples_per_step: of all ranks together; None where it is not known.
        calibration: which steps are measured by kernels as well; None: on a CPU.
        watchdog: that group of the configuration.
    """

    asked: RequestedConfig
    clock: Clock
    telemetry: Telemetry
    instrument: InstrumentSettings
    backend: str | None
    parallel: str
    plan: Mapping[str, Any]
    start_step: int
    warmup_steps: int
    emulated_fabric: bool = False
    emulated_ranks: int | None = None
    ranks_per_device: int = 1
    own_streams: Mapping[int, int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    remarks: Mapping[str, Any] = field(default_factory=dict)
    own_loggers: Sequence[Logger] = ()
    samples_per_step: int | None = None
    calibration: CalibrationPlan | None = None
    watchdog: Watchdog = field(default_factory=Watchdog)


@dataclass(frozen=True)
class RecordedRun:
    """A run whose manifest and record are open on every rank.

    Attributes:
        record: this rank's, with its header written.
        clocks: of the ranks, measured once; the code that ends the run measures them again after the footer.
        calibrator: called with each step by the code that drives the run.
        progress: of this rank, for whoever reads it from outside.
    """

    request: RunRequest
    site: RunSite
    record: RankRecordWriter
    clocks: ClockSynchronisation
    devices: DeviceSampler
    loggers: LiveLoggers
    calibrator: Calibrator
    progress: Progress

    def instrument(
        self,
        *,
        fabric: EmulatedNetwork | None = None,
        together: int = 1,
        then: Callable[[Step], None] = lambda _step: None,
    ) -> Instrumentation:
        """Return the instrument whose finished steps go into the record, each with the device samples of its time.

        Args:
            fabric, together: as `Instrumentation` takes them.
            then: called with each step once it is written.
        """

        def finished(step: Step) -> None:
            self.record.step(self.devices.onto(step), self.request.clock.anchor_interval)
            self.loggers.take(step)
            self.calibrator.take(step)
            then(step)

        instrument = open_instrument(
            self.request.instrument,
            self.site.topology,
            self.site.device,
            finished,
            anchor=self.record.header.clock,
            fabric=fabric,
            together=together,
            cutoff=self.record.header.stall_cutoff,
            progress=self.progress,
        )
        self.calibrator.attach(instrument.recorder)
        return instrument


@contextmanager
def recorded_run(request: RunRequest, site: RunSite) -> Iterator[RecordedRun]:
    """Open a run on every rank, or on none; collective. On exit sampling ends and the record's file is closed, and a
    run of one rank says once more that it had no communication; writing a footer is up to the caller.

    Raises:
        PeerFailed: on every rank, when one cannot write its part.
    """
    clocks = measured_clocks(request.clock, site)
    devices = device_sampler(request.telemetry, site.device)
    mode: InstrumentMode = request.instrument.mode.value
    delayed = request.emulated_fabric and request.emulated_ranks is None  # otherwise by the backend itself
    ensure_built(mode, wanted=request.instrument.native, emulated=delayed)
    interceptor = interceptor_for(site.device, mode, wanted=request.instrument.native, emulated=delayed)
    cutoff = stall_cutoff(request.instrument.stall_cutoff_us, site.device, mode)
    entry = interceptor | {"stall_cutoff": msgspec.to_builtins(cutoff)}
    ranks = site.peers.gather("facts", rank_facts(site.topology, site.device, devices.facts()) | entry)
    cutoff = slowest_of_host(cutoff, site.topology.host, ranks)
    alone = _alone(site) if request.emulated_ranks is None else None
    from_python = timed_from_python(interceptor.get("interceptor"), platform_of(site.device))
    checks = [*environment_checks(request, site), *(check for check in (alone, from_python) if check is not None)]
    for check in checks if site.topology.rank == 0 else ():
        _log.log(check.level, check.text)
    more = {
        "emulated_ranks": request.emulated_ranks,
        **request.facts,
        "warnings": [check.text for check in checks],
        **request.remarks,
    }
    publish_manifest(site, request.asked, clocks, ranks, request.backend, request.plan, more)
    record = RankRecordWriter.open(site.folder, site.peers, header_of(request, site, devices.header, cutoff))
    calibrator = Calibrator(request.calibration, site.device, record.write)
    record.before_footer = calibrator.finish
    open_runs.append(request)
    try:
        with (
            devices,
            live_loggers(request, site, record.header) as loggers,
            noted_progress(
                site.folder,
                site.topology,
                request.warmup_steps,
                request.watchdog,
                completed_late=site.device.type != "cpu",
            ) as progress,
        ):
            yield RecordedRun(request, site, record, clocks, devices, loggers, calibrator, progress)
    finally:
        open_runs.remove(request)
        record.writer.close()


def measured_clocks(settings: Clock, site: RunSite) -> ClockSynchronisation:
    """Return every rank's clock against rank 0's, measured for the first time; collective.

    Raises:
        PeerFailed: a rank did not take part.
    """
    clocks = ClockSynchronisation(settings, site.peers, site.topology, site.folder)
    clocks.at_start()
    return clocks


def publish_manifest(
    site: RunSite,
    asked: RequestedConfig,
    clocks: ClockSynchronisation,
    ranks: list[dict[str, Any]],
    backend: str | None,
    plan: Mapping[str, Any],
    more: Mapping[str, Any] | None = None,
) -> None:
    """Rank 0 writes `run.json`; collective.

    Args:
        ranks: `rank_facts` of every rank, in rank order.
        more: entries after those that every run has.

    Raises:
        PeerFailed: on every rank, when it could not be written.
    """
    error = None
    if site.peers.rank == 0:
        measured = clocks.result
        try:
            manifest = build_manifest(asked, site.folder, site.topology, site.device, backend, ranks, plan)
            manifest["clock_sync"] = measured and measured.summary()
            write_manifest(site.folder, {**manifest, **(more or {})})
        except OSError as problem:
            error = f"cannot write {site.folder.path / MANIFEST_FILE}: {problem.strerror or problem}"
    site.peers.agree("manifest", error)


@contextmanager
def untrained_run(
    resolved: Resolved,
    topology: Topology,
    device: torch.device,
    peers: Peers,
    backend: str | None,
    plan: Mapping[str, Any],
) -> Iterator[tuple[RunSite, ClockSynchronisation, list[dict[str, Any]]]]:
    """Open the run of a workload that trains nothing: a fresh folder with its manifest, clocks, and a log while it is
    open; collective. Yields the site, the clocks, which the caller measures again where it comes to its end, and
    `rank_facts` of all ranks.

    Raises:
        ConfigError: the folder holds a run already. PeerFailed: a rank did not take part.
    """
    config = resolved.config
    base = Path(config.training.output_dir) / (config.label or "")
    with occupied(base, topology, peers) as folder, ExitStack() as stack:
        prepare(folder, topology, peers, overwrite=config.training.overwrite, resuming=False)
        stack.enter_context(log_to(folder.log(topology.rank)))
        for note in resolved.notes if topology.rank == 0 else ():
            _log.warning(note)
        site = RunSite(folder, topology, device, peers)
        clocks = measured_clocks(config.clock, site)
        ranks = peers.gather("facts", rank_facts(topology, device))
        asked = RequestedConfig(config.label, resolved.plain, resolved.manifest_hash)
        publish_manifest(site, asked, clocks, ranks, backend, plan)
        yield site, clocks, ranks


def header_of(
    request: RunRequest,
    site: RunSite,
    device_telemetry: DeviceTelemetry | None,
    cutoff: StallCutoff | None,
) -> Header:
    """Return the first line of one rank's record, with the current time."""
    topology, device = site.topology, site.device
    return Header(
        schema_version=SCHEMA_VERSION,
        run_id=site.folder.run_id,
        label=request.asked.label or default_label(device),
        attempt=site.folder.attempt,
        rank=topology.rank,
        world_size=topology.world_size,
        emulated_ranks=request.emulated_ranks,
        local_rank=topology.local_rank,
        node_rank=topology.node_rank,
        host=topology.host,
        pid=topology.pid,
        boot_id=boot_id(),
        platform=platform_of(device),
        device=device_name(device),
        backend=request.backend,
        parallel=request.parallel,
        timer=_TIMERS[platform_of(device)],
        instrument_mode=request.instrument.mode.value,
        manifest_hash=request.asked.manifest_hash,
        start_step=request.start_step,
        warmup_steps=request.warmup_steps,
        clock=read_clocks(),
        device_telemetry=device_telemetry,
        stall_cutoff=cutoff,
        calibration=request.calibration,
    )


def open_instrument(
    settings: InstrumentSettings,
    topology: Topology,
    device: torch.device,
    sink: Callable[[Step], None],
    *,
    anchor: ClockReading | None = None,
    fabric: EmulatedNetwork | None = None,
    together: int = 1,
    cutoff: StallCutoff | None = None,
    progress: Progress | None = None,
) -> Instrumentation:
    """Return the instrument as a configuration asks for it; whoever takes it closes it.

    Args:
        sink: takes finished steps in order.
        anchor: places MONOTONIC in wall-clock time; None: the clocks of this moment.
        fabric, together: as `Instrumentation` takes them.
        cutoff: of stalls on this host; None: `STALL_CUTOFF_NS`.
        progress: as `Instrumentation` takes it.
    """
    return Instrumentation(
        device,
        settings.mode.value,
        topology.rank,
        topology.world_size,
        anchor or read_clocks(),
        sink,
        settings.stream_priority,
        fabric,
        native=settings.native,
        dedicated_async=settings.dedicated_async,
        together=together,
        stall_cutoff_ns=STALL_CUTOFF_NS if cutoff is None else cutoff.cutoff_ns,
        progress=progress,
    )


def device_sampler(settings: Telemetry, device: torch.device) -> DeviceSampler:
    """Return the sampler of this rank's device, which starts when entered. A missing source is logged."""
    keep_words = settings.rocm_smi
    if keep_words and platform_of(device) != "rocm" and not settings.force:
        keep_words = False
        _log.warning(
            "telemetry.rocm_smi: this run computes on %s, so nothing is sampled; telemetry.force=true samples all the "
            "same",
            device_name(device),
        )
    forced = keep_words and platform_of(device) != "rocm"
    opened = open_source(settings.devices, settings.device_interval_s, identify(device), keep_words, forced=forced)
    if opened.problem is not None:
        _log.warning("telemetry.devices=%s: no device samples: %s", settings.devices.name, opened.problem)
    elif opened.interval_s is not None and opened.interval_s > settings.device_interval_s and opened.source is not None:
        _log.info("telemetry: %s is read every %g s", opened.source.name, opened.interval_s)
    return DeviceSampler(opened, keep_words, settings.device_interval_s)


def live_loggers(request: RunRequest, site: RunSite, header: Header) -> LiveLoggers:
    """Return the loggers of this run, which open when entered: those that were asked for on rank 0, none elsewhere."""
    settings, root = request.telemetry, header.rank == 0
    facts = {name: getattr(header, name) for name in ("run_id", "label", "attempt", "platform", "device", "parallel")}
    return LiveLoggers(
        [name.value for name in settings.loggers] if root else (),
        Place(
            site.folder.path,
            header.label,
            facts | {"world_size": header.world_size, "folder": str(site.folder.path)},
        ),
        request.own_loggers if root else (),
        interval=settings.logger_interval,
        samples_per_step=request.samples_per_step,
    )


def environment_checks(request: RunRequest, site: RunSite) -> list[EnvironmentWarning]:
    """Return what distorts this run: settings, given the streams it opens, and more ranks than cores."""
    looking = request.instrument.mode is not Mode.off
    platform = platform_of(site.device)
    priority = request.instrument.stream_priority
    streams = streams_used(request.own_streams, len(all_groups()), looking=looking, priority=priority)
    found = setting_warnings(os.environ, platform, streams, timing_events=looking)
    crowded = too_many_ranks(site.topology.local_world_size, cores(), platform)
    shared = None if platform == "cpu" else shared_device(request.ranks_per_device, mps=mps_runs())
    return [*found, *(one for one in (crowded, shared) if one is not None)]


def _alone(site: RunSite) -> EnvironmentWarning | None:
    on_cpu = platform_of(site.device) == "cpu"
    devices = cores() if on_cpu else torch.accelerator.device_count()
    return one_rank(site.topology.world_size, devices, sys.argv)
