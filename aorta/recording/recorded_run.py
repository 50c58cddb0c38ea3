"""Wires one run: clocks, device samples, manifest, header, record and instrumentation, in the order of their
dependencies.

Training (`train`), `aorta.record` (`api`) and RPC runs (`aorta.rpc`) all use it, so that runs which differ only in who
drives them leave the same files. Must not know what is run: whatever differs between runs is in a `RunRequest`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from aorta.config.loop import observed_every
from aorta.config.resolve import Resolved
from aorta.config.schema import Clock, Mode, Telemetry, Watchdog
from aorta.config.schema import Instrument as InstrumentSettings
from aorta.device_metrics.sampler import DeviceSampler, open_source
from aorta.device_metrics.sources import identify
from aorta.distributed.clock_measurement import ClockSynchronisation
from aorta.distributed.cuda import mps_runs
from aorta.distributed.environment_checks import (
    cores,
    one_rank,
    python_timing_warning,
    setting_warnings,
    shared_device,
    streams_used,
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
from aorta.errors import AortaError
from aorta.instrument.backend_calls import slowest_of_host, stall_cutoff
from aorta.instrument.dispatcher import all_groups
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.native.build import ensure_built, interceptor_for
from aorta.instrument.ring_lines import LentRecord
from aorta.instrument.sampling import KNOWN_SHARE, Choice, Sampler, seed_of
from aorta.loggers import LoggedRun, Logger
from aorta.recording.calibration import Calibrator
from aorta.recording.live_steps import FollowedRecord, LiveLoggers, ShownStep
from aorta.recording.rank_process import log_to
from aorta.recording.rank_record import RankRecordWriter, exit_code_of, open_ring
from aorta.records.clocks import boot_id, read_clocks
from aorta.records.progress import Progress
from aorta.records.ring_file import RingFile
from aorta.records.run_files import MANIFEST_FILE, read_manifest
from aorta.records.schema import (
    SCHEMA_VERSION,
    STALL_CUTOFF_NS,
    CalibrationPlan,
    Header,
    InstrumentMode,
    Platform,
    Step,
    Timer,
)

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
    """Where a run takes place: the folder that all ranks agreed on, which rank this is, and its device."""

    folder: RunFolder
    topology: Topology
    device: torch.device
    peers: Peers


@dataclass(frozen=True)
class RunRequest:
    """One recorded run: everything in its manifest and headers that does not follow from the machine."""

    asked: RequestedConfig
    clock: Clock
    telemetry: Telemetry
    instrument: InstrumentSettings
    backend: str | None  # of torch.distributed; None: there is no process group
    parallel: str  # the strategy's name
    plan: Mapping[str, Any]  # effective settings of the strategy
    start_step: int  # global step of the first one
    warmup_steps: int  # first steps that are flagged as warm-up
    emulated_fabric: bool = False
    emulated_ranks: int | None = None  # ranks that the only process stands for; None: every rank is a process
    ranks_per_device: int = 1
    own_streams: Mapping[int, int] = field(default_factory=dict)  # of the run, by priority, without the compute stream
    facts: Mapping[str, Any] = field(default_factory=dict)  # entries of the manifest before the warnings
    remarks: Mapping[str, Any] = field(default_factory=dict)  # entries of the manifest after the warnings
    own_loggers: Sequence[Logger] = ()  # of the caller, beside those that `telemetry` names
    samples_per_step: int | None = None  # of all ranks together; None: not known
    calibration: CalibrationPlan | None = None  # None: on a CPU
    watchdog: Watchdog = field(default_factory=Watchdog)
    profiled: Callable[[int], bool] = lambda _step: False  # whether the run's own profiler is on in a global step
    exit_code: Callable[[BaseException], int] = exit_code_of  # of the process that an error ends


@dataclass(frozen=True)
class RecordedRun:
    """A run whose manifest and record are open on every rank.

    Attributes:
        record: this rank's, with its header written.
        clocks: measured once; the code that ends the run measures them again after the footer.
        calibrator: called with each step by the code that drives the run.
        ring: of this rank.
    """

    request: RunRequest
    site: RunSite
    record: RankRecordWriter
    clocks: ClockSynchronisation
    devices: DeviceSampler
    loggers: LiveLoggers
    calibrator: Calibrator
    ring: RingFile

    @property
    def progress(self) -> Progress:
        """Where this rank is in its loop."""
        return self.ring.progress

    def instrument(
        self,
        *,
        fabric: EmulatedNetwork | None = None,
        then: Callable[[Step | ShownStep], None] | None = None,
    ) -> Instrumentation:
        """Return the instrument whose finished steps go into the record with their device samples, and then to `then`.
        `fabric`: as `Instrumentation` takes them.
        """
        interval = self.request.clock.anchor_interval

        def shown(step: Step | ShownStep) -> None:
            self.loggers.take(step)
            if then is not None:
                then(step)

        def finished(step: Step) -> None:
            self.record.step(self.devices.onto(step), interval)
            self.calibrator.take(step)
            shown(step)

        if self.request.watchdog.timeout_s != 0 and self.site.device.type == "cpu" and not self.devices.is_sampling:
            is_shown = self.loggers.has_takers or then is not None
            followed = FollowedRecord(self.record.writer.path, shown) if is_shown else nullcontext()
            self.record.lent = LentRecord(self.record.writer, interval, followed)

        settings, header, topology = self.request.instrument, self.record.header, self.site.topology
        cutoff = header.stall_cutoff
        instrument = Instrumentation(
            self.site.device,
            settings.mode.value,
            topology.rank,
            topology.world_size,
            header.clock,
            finished,
            settings.stream_priority,
            fabric,
            native=settings.native,
            dedicated_async=settings.dedicated_async,
            stall_cutoff_ns=STALL_CUTOFF_NS if cutoff is None else cutoff.cutoff_ns,
            ring=self.ring,
            elsewhere=self.record.lent,
        )
        self.calibrator.attach(instrument.recorder)
        if instrument.why_off is None:
            instrument.recorder.sampler = self._sampler(counted=instrument.recorder.own_is_counted)
        return instrument

    def _sampler(self, *, counted: bool) -> Sampler | None:
        """Return what chooses the steps that are observed; None: all are. `counted`: AORTA's own time is known."""
        request, peers, folder = self.request, self.site.peers, self.site.folder
        every, alone = observed_every(request.instrument.every), self.site.topology.world_size == 1
        if every is None and not counted:
            if peers.is_first:
                _log.warning(
                    "instrument.every=auto: every step is observed, as AORTA's own time is not counted where "
                    "collectives are timed from Python; give a number instead"
                )
            return None
        if every == 1:
            return None

        def tell(choice: Choice) -> None:
            if not peers.is_first:
                return
            text = f"1 in {choice.every} steps is observed from step {choice.from_step} on" if choice.every > 1 else ""
            text = text or "every step is observed"
            least = choice.passed_us / (choice.step_ms * 1e3)
            reaches = choice.known_share <= KNOWN_SHARE
            _log.log(
                logging.INFO if reaches else logging.WARNING,
                "instrument.every=auto: %s: of a step of %.3g ms AORTA's own work takes %.0f us where it is observed "
                "and %.0f us where it is not, %.2g %% on average%s",
                text,
                choice.step_ms,
                choice.observed_us,
                choice.passed_us,
                100 * choice.known_share,
                "" if reaches else f": a step that is not observed takes {100 * least:.2g} % by itself",
            )
            more = {**choice._asdict(), "known_share": choice.known_share}
            try:
                manifest = read_manifest(folder.path)
                write_manifest(folder, {**manifest, "sampling": {**manifest["sampling"], **more}})
            except (OSError, ValueError, AortaError) as error:
                _log.error("%s does not say which steps are observed: %s", folder.path / MANIFEST_FILE, error)

        return Sampler(
            every,
            seed_of(folder.run_id),
            request.start_step,
            request.warmup_steps,
            None if alone else peers.store,
            is_first=peers.is_first,
            always=request.profiled,
            tell=tell,
        )


@contextmanager
def recorded_run(request: RunRequest, site: RunSite) -> Iterator[RecordedRun]:
    """Open a run on every rank, or on none; collective. On exit sampling ends and the record's file is closed; the
    caller writes the footer. Raises PeerFailed on every rank, when one cannot write its part.
    """
    topology, device, settings = site.topology, site.device, request.telemetry
    platform, root = platform_of(device), site.peers.is_first
    clocks = ClockSynchronisation(request.clock, site.peers, topology, site.folder)
    clocks.at_start()
    keep_words = settings.rocm_smi and (platform == "rocm" or settings.force)
    if settings.rocm_smi and not keep_words:
        _log.warning(
            "telemetry.rocm_smi: not sampled, as this run computes on %s; telemetry.force=true samples all the same",
            device_name(device),
        )
    forced = keep_words and platform != "rocm"
    opened = open_source(settings.devices, settings.device_interval_s, identify(device), keep_words, forced=forced)
    if opened.problem is not None:
        _log.warning("telemetry.devices=%s: no device samples: %s", settings.devices.name, opened.problem)
    elif opened.interval_s is not None and opened.interval_s > settings.device_interval_s and opened.source is not None:
        _log.info("telemetry: %s is read every %g s", opened.source.name, opened.interval_s)
    devices = DeviceSampler(opened, keep_words, settings.device_interval_s)

    mode: InstrumentMode = request.instrument.mode.value
    delayed = request.emulated_fabric and request.emulated_ranks is None  # otherwise by the backend itself
    ensure_built(mode, wanted=request.instrument.native, emulated=delayed)
    interceptor = interceptor_for(device, mode, wanted=request.instrument.native, emulated=delayed)
    cutoff = stall_cutoff(request.instrument.stall_cutoff_us, device, mode)
    entry = interceptor | {"stall_cutoff": msgspec.to_builtins(cutoff)}
    ranks = site.peers.gather("facts", rank_facts(topology, device, devices.facts()) | entry)
    cutoff = slowest_of_host(cutoff, topology.host, ranks)

    looking = request.instrument.mode is not Mode.off
    priority = request.instrument.stream_priority
    streams = streams_used(request.own_streams, len(all_groups()), looking=looking, priority=priority)
    alone = None
    if request.emulated_ranks is None:
        available = cores() if platform == "cpu" else torch.accelerator.device_count()
        alone = one_rank(topology.world_size, available, sys.argv)
    more_checks = [
        too_many_ranks(topology.local_world_size, cores(), platform),
        None if platform == "cpu" else shared_device(request.ranks_per_device, mps=mps_runs()),
        alone,
        python_timing_warning(interceptor.get("interceptor")),
    ]
    checks = setting_warnings(os.environ, platform, streams, timing_events=looking)
    checks += [check for check in more_checks if check is not None]
    for check in checks if root else ():
        _log.log(check.level, check.text)
    sampling: dict[str, Any] = {}
    if looking and (every := observed_every(request.instrument.every)) != 1:
        sampling = {"asked": request.instrument.every, "every": every, "seed": seed_of(site.folder.run_id)}
    more = {
        "emulated_ranks": request.emulated_ranks,
        **request.facts,
        **({"sampling": sampling} if sampling else {}),
        "warnings": [check.text for check in checks],
        **request.remarks,
    }
    publish_manifest(site, request.asked, clocks, ranks, request.backend, request.plan, more)

    header = Header(
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
        platform=platform,
        device=device_name(device),
        backend=request.backend,
        parallel=request.parallel,
        timer=_TIMERS[platform],
        instrument_mode=mode,
        manifest_hash=request.asked.manifest_hash,
        start_step=request.start_step,
        warmup_steps=request.warmup_steps,
        clock=read_clocks(),
        device_telemetry=devices.header,
        stall_cutoff=cutoff,
        calibration=request.calibration,
        every=request.instrument.every if looking else None,
    )
    record = RankRecordWriter.open(site.folder, site.peers, header)
    calibrator = Calibrator(request.calibration, device, record.write)
    record.before_footer = calibrator.finish
    facts = {name: getattr(header, name) for name in ("run_id", "label", "attempt", "platform", "device", "parallel")}
    facts |= {"world_size": header.world_size, "folder": str(site.folder.path)}
    live = LiveLoggers(
        [logger.value for logger in settings.loggers] if root else (),
        LoggedRun(site.folder.path, header.label, facts),
        request.own_loggers if root else (),
        interval=settings.logger_interval,
        samples_per_step=request.samples_per_step,
    )
    of_rank = open_ring(site.folder, topology, request.warmup_steps, request.watchdog, request.exit_code)
    open_runs.append(request)
    try:
        with devices, live as loggers, of_rank as ring:
            yield RecordedRun(request, site, record, clocks, devices, loggers, calibrator, ring)
    finally:
        open_runs.remove(request)
        record.writer.close()


@contextmanager
def untrained_run(
    resolved: Resolved,
    topology: Topology,
    device: torch.device,
    peers: Peers,
    backend: str | None,
    plan: Mapping[str, Any],
) -> Iterator[tuple[RunSite, ClockSynchronisation]]:
    """Open the run of a workload that trains nothing: a fresh folder with manifest, clocks and log; collective. Yields
    the site and the clocks, which the caller measures again at the end.

    Raises:
        ConfigError: another run uses the folder. PeerFailed: a rank did not take part.
    """
    config = resolved.config
    base = Path(config.training.output_dir) / (config.label or "")
    with occupied(base, topology, peers) as folder, ExitStack() as stack:
        prepare(folder, topology, peers, overwrite=config.training.overwrite, resuming=False)
        stack.enter_context(log_to(folder.log(topology.rank)))
        for note in resolved.notes if topology.rank == 0 else ():
            _log.warning(note)
        site = RunSite(folder, topology, device, peers)
        clocks = ClockSynchronisation(config.clock, peers, topology, folder)
        clocks.at_start()
        ranks = peers.gather("facts", rank_facts(topology, device))
        asked = RequestedConfig(config.label, resolved.plain, resolved.manifest_hash)
        publish_manifest(site, asked, clocks, ranks, backend, plan)
        yield site, clocks


def publish_manifest(
    site: RunSite,
    asked: RequestedConfig,
    clocks: ClockSynchronisation,
    ranks: list[dict[str, Any]],
    backend: str | None,
    plan: Mapping[str, Any],
    more: Mapping[str, Any] | None = None,
) -> None:
    """Have rank 0 write `run.json`; collective. Raises PeerFailed on every rank where it cannot.

    Args:
        ranks: `rank_facts` of every rank, in rank order.
        more: entries after those that every run has.
    """
    error = None
    if site.peers.is_first:
        measured = clocks.result
        try:
            manifest = build_manifest(asked, site.folder, site.topology, site.device, backend, ranks, plan)
            manifest["clock_sync"] = measured and measured.summary()
            write_manifest(site.folder, {**manifest, **(more or {})})
        except OSError as problem:
            error = f"cannot write {site.folder.path / MANIFEST_FILE}: {problem.strerror or problem}"
    site.peers.agree("manifest", error)
