"""What a rank writes for as long as a run is recorded: its record, from a header to a footer that says why it ended,
and its ring, which the watchdog of its host reads.

Must not lose what was measured: whatever ends the loop, the steps in progress are read and written first. Must not fail
a run where the ring's file or the watchdog cannot be had: it goes on without.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgspec

from aorta.autopsy.stacks import stacks_on_request
from aorta.config.schema import Watchdog
from aorta.distributed.output_folder import RunFolder
from aorta.distributed.peers import Peers
from aorta.distributed.topology import Topology
from aorta.errors import SIGNAL_EXIT_BASE, AortaError, RecordWriteError
from aorta.installation import own_environment, own_program
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.ring_lines import LentRecord
from aorta.recording.meeting import joined
from aorta.records.clocks import boot_id, read_clocks
from aorta.records.files import shared_folder
from aorta.records.process import pid_namespace, start_ticks
from aorta.records.progress import PROGRESS_DIR, PROGRESS_FILE, STACKS_FILE, ProgressFacts
from aorta.records.record_file import RecordWriter
from aorta.records.ring_file import RingFile
from aorta.records.schema import Anchor, Calibration, DeviceClockFacts, Footer, Header, Step

_log = logging.getLogger(__name__)


class RankRecordWriter:
    """One open record: its writer and its header. `explain`: as `Peers.explain`.

    Attributes:
        may_end_early: a full disk ends the record, and not the loop, which is not AORTA's.
        ended_early: why it did; None: it did not.
        lent: who lends it; None: nobody.
        before_footer: writes what comes after the steps.
    """

    def __init__(self, writer: RecordWriter, header: Header, explain: Callable[[Exception], AortaError]) -> None:
        self.writer, self.header, self._explain = writer, header, explain
        self._footer: Footer | None = None
        self.may_end_early = False
        self.ended_early: str | None = None
        self.lent: LentRecord | None = None
        self.before_footer: Callable[[], None] = lambda: None
        writer.write(header)

    @classmethod
    def open(cls, folder: RunFolder, peers: Peers, header: Header) -> RankRecordWriter:
        """Open a record on every rank, or on none; collective. The caller closes its writer. Raises PeerFailed on every
        rank, when one could not create its file; names it.
        """
        record, error = None, None
        with ExitStack() as stack:
            try:
                writer = RecordWriter(folder.record(header.rank), header.rank)
                stack.callback(writer.close)
                record = cls(writer, header, peers.explain)
            except RecordWriteError as problem:
                error = str(problem)
            peers.agree("record", error)
            assert record is not None  # agree raises when any rank, including this one, has an error
            stack.pop_all()
        return record

    def step(self, line: Step, anchor_interval: int) -> None:
        """Write a finished step, and a reading of the clocks after every `anchor_interval` training steps (R7)."""
        self.write(line)
        if line.phase == "train" and (line.global_step + 1) % anchor_interval == 0:
            self.write(Anchor(line.global_step, read_clocks()))

    def write(self, line: Step | Anchor | Calibration) -> None:
        """Write a line, unless the record has ended early."""
        if self.ended_early is not None:
            return
        try:
            self.writer.write(line)
        except RecordWriteError as error:
            if not self.may_end_early:
                raise
            self.ended_early = str(error)
            _log.error("%s. The loop goes on unrecorded", error)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Write a footer that says why, when what is built between header and loop fails."""
        try:
            yield
        except Exception as error:
            explained = self._explain(error)
            with suppress(RecordWriteError):
                self._take_back()
                self.writer.write(
                    Footer("error", explained.exit_code, steps_written=0, clock=read_clocks(), error=str(explained))
                )
            self.writer.close()
            if explained is error:
                raise
            raise explained from error

    @contextmanager
    def closed_by(self, instrument: Instrumentation, stopped_by: Callable[[], signal.Signals | None]) -> Iterator[None]:
        """Write the last steps and the footer when the loop ends. The file stays open (`refused`). A footer that cannot
        be written does not replace the error that ended the loop. `stopped_by`: the signal that ended it, if any.
        """
        try:
            yield
            instrument.recorder.finish()
        except Exception as error:
            # Explained before the footer is written, so that the record names the failed peer.
            explained = self._explain(error)
            self.fail(instrument, explained.exit_code, str(explained))
            if explained is error:
                raise
            raise explained from error
        except KeyboardInterrupt:
            self.fail(instrument, SIGNAL_EXIT_BASE + signal.SIGINT, "interrupted at once by a second SIGINT")
            raise
        else:
            self.complete(instrument, stopped_by())

    def refused(self, code: int, error: str) -> None:
        """Rewrite the footer, where what follows a whole loop ends this rank with `error`. It was written before, so
        that a rank killed in between leaves a whole record. Never raises.
        """
        if self._footer is None:
            return
        try:
            self.writer.replace_last(msgspec.structs.replace(self._footer, exit_code=code, error=error))
        except RecordWriteError as problem:
            _log.error("cannot note exit code %d in the record: %s", code, problem)

    def complete(self, instrument: Instrumentation, stopped_by: signal.Signals | None = None) -> None:
        """Write the footer of a loop that ended as it should, or by a signal."""
        code = 0 if stopped_by is None else SIGNAL_EXIT_BASE + stopped_by
        self._write_footer(instrument, code, None, stopped_by, instrument.clock.facts())

    def fail(self, instrument: Instrumentation, code: int, error: str) -> None:
        """Write the last steps that can be read, and a footer with `error`. Never raises."""
        with suppress(RecordWriteError):  # which may be the error, and there is room for the footer
            instrument.recorder.salvage()
        self._write_footer(instrument, code, error)

    def _take_back(self) -> None:
        if self.lent is not None:
            self.lent.take_back(wait=True)

    def _write_footer(
        self,
        instrument: Instrumentation,
        code: int,
        error: str | None,
        stopped_by: signal.Signals | None = None,
        device_clock: DeviceClockFacts | None = None,
    ) -> None:
        def footer(steps: int) -> Footer:
            failed = error is not None or self.ended_early is not None
            return Footer(
                reason="error" if failed else "completed" if stopped_by is None else "signal",
                exit_code=code,
                steps_written=steps,
                clock=read_clocks(),
                groups={name: list(group.ranks) for name, group in instrument.groups.items()},
                signal=None if stopped_by is None else stopped_by.name,
                error="; ".join(filter(None, (error, self.ended_early))) or None,
                device_clock=device_clock,
                outside=instrument.recorder.outside,
                steps_lost=max(instrument.recorder.steps_ended - steps, 0),
            )

        try:
            self._take_back()
            self.before_footer()
            self._footer = self.writer.write_last(footer)
        except RecordWriteError as problem:
            if error is None and not self.may_end_early:
                raise
            _log.error("the record ends without a footer: %s", problem)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a command of AORTA that ends with `error`."""
    match error:
        case AortaError():
            return error.exit_code
        case SystemExit(code=int(code)):
            return code
        case SystemExit(code=None):
            return 0
        case KeyboardInterrupt():
            return SIGNAL_EXIT_BASE + signal.SIGINT
    return 1


_watchdogs: list[subprocess.Popen[bytes]] = []
"""Of this process; each ends by itself, when the last rank of its host has."""


@atexit.register
def _leave() -> None:
    """Keep Python from warning of a watchdog that still runs: it is not waited for, as other ranks may run on."""
    for process in _watchdogs:
        process.returncode = process.poll() or 0


@contextmanager
def open_ring(
    folder: RunFolder,
    topology: Topology,
    warmup_steps: int,
    settings: Watchdog,
    exit_code: Callable[[BaseException], int] = exit_code_of,
) -> Iterator[RingFile]:
    """Open the rank's ring for the length of a `with` block; local rank 0 starts the watchdog of its host.

    Args:
        exit_code: of the process, where this error ends the block.
    """
    with ExitStack() as stack:
        directory, ring, meeting = folder.path / PROGRESS_DIR, None, joined.get()
        try:
            shared_folder(directory)
            number = stack.enter_context(stacks_on_request(directory / STACKS_FILE.format(rank=topology.rank)))
            facts = ProgressFacts(
                rank=topology.rank,
                world_size=topology.world_size,
                local_rank=topology.local_rank,
                pid=topology.pid,
                start_ticks=start_ticks(topology.pid),
                pid_namespace=pid_namespace(),
                host=topology.host,
                boot_id=boot_id(),
                run_id=folder.run_id,
                attempt=folder.attempt,
                warmup_steps=warmup_steps,
                main_thread=threading.get_ident() if meeting is None else meeting.trains_in,
                stack_signal=number,
                error_file=os.environ.get("TORCHELASTIC_ERROR_FILE"),
            )
            ring = RingFile.create(directory / PROGRESS_FILE.format(rank=topology.rank), facts)
        except OSError as error:
            why = error.strerror or error
            _log.warning(
                "no watchdog, no autopsy of this rank, and a kill loses its last steps: %s cannot be written (4.5 MB a "
                "rank): %s",
                directory,
                why,
            )
            ring = RingFile.create(None)
        stack.callback(ring.close)
        if topology.local_rank == 0 and settings.timeout_s != 0 and ring.path is not None:
            _start_watchdog(folder, topology, settings)
        try:
            yield ring
        except BaseException as error:
            ring.progress.end(exit_code(error))
            raise
        ring.progress.end(ring.progress.exit_code)


def _start_watchdog(folder: RunFolder, topology: Topology, settings: Watchdog) -> None:
    _watchdogs[:] = [process for process in _watchdogs if process.poll() is None]
    first = topology.rank
    task = {
        "folder": str(folder.path),
        "run_id": folder.run_id,
        "attempt": folder.attempt,
        "ranks": list(range(first, first + topology.local_world_size)),
        "timeout_s": settings.timeout_s,
        "grace_s": settings.grace_s,
    }
    try:
        # In a session of its own, as launchers end the ranks' whole process groups; without their sockets, which would
        # stay open when a rank dies.
        _watchdogs.append(
            subprocess.Popen(
                own_program("aorta.autopsy.watchdog", json.dumps(task)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                close_fds=True,
                env=own_environment(),
            )
        )
    except OSError as error:
        _log.warning("no watchdog: it cannot be started: %s", error.strerror or error)
