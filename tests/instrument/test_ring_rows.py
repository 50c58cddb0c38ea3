"""Rows that Python appends are those of compiled code, whoever comes in between."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aorta.instrument import ring_rows as module
from aorta.instrument.native.native_interceptor import NativeInterceptor
from aorta.instrument.python_interceptor import PythonInterceptor
from aorta.instrument.ring_rows import NOWHERE, RingRows
from aorta.records import ring_file as rf
from aorta.records.ring_file import RingFile
from tests.instrument.taps import compiled_part, ring_in_memory

THREADS, ROWS = 4, 500


def small(slots: int = 4, path: Path | None = None) -> RingFile:
    """A ring of few rows."""
    return RingFile.create(path, slots=slots)


def stepped(interceptor: NativeInterceptor | PythonInterceptor, ring: RingFile) -> Any:
    """Rows of two steps, one of them passed over, and of any: without the times when they were written."""
    begin, end, span, value, append = interceptor.functions(lambda: next(counts))
    counts = iter([{1: 2, 2: 5}, {1: 4, 3: 7, 2: None}])
    enter = ring.progress.enter
    for _ in range(5):  # the first are overwritten
        append(rf.RANGE, 255, 0xFFFF, 1, -2, 3, -(1 << 63), (1 << 63) - 1, 8)
    phases = []
    for flags, lr, drawn in ((rf.WARMUP | 1 << rf.PHASE_SHIFT, 1e-3, 16), (rf.PASSED_OVER | rf.BLIND, -0.0, None)):
        step, dropped = begin(0, flags, 3, 7, 1 << 32 | 5, NOWHERE, lr, drawn)
        assert dropped == 0
        with span(rf.AUX, 4, "data", 0, False):
            with pytest.raises(OSError, match="full"), span(rf.PIPELINE, 5, "backward", 6, True):
                raise OSError("full")
            with span(rf.COMPUTE, 5, "mine", 6, True), span(rf.AUX, 4, "clip", 0, True):
                phases.append(enter("optimizer"))
            value(rf.LOSS, 0.1)
            phases.append(enter("optimizer"))
        ranges = partial(append, rf.RANGE, 0, 9, 1, 2, 0, 0, 0, step)
        own_ns, ended_ns, behind = end(time.perf_counter_ns(), rf.OWN_COUNTED, 2, 3, 1_000, ranges if lr > 0 else None)
        assert own_ns >= 1_000
        phases.append(enter("none"))
        rows, first = ring.rows_since(0)
        assert (rows["b"][step - first], rows["y"][step - first], rows["a2"][step - first]) == (ended_ns, behind, step)
        assert rows["a"][-1] == own_ns
    interceptor.rows.time_step(step, 21, 22)
    assert phases == ["clip", "backward", "none"] * 2
    rows, _ = ring.rows_since(0)
    for column in ("a", "b"):
        times = np.isin(rows["kind"], (rf.STEP, rf.AUX, rf.PIPELINE, rf.COMPUTE)) & (rows["stamp"] - 1 != step)
        times |= (column == "a") & np.isin(rows["kind"], (rf.VALUE, rf.SUMMARY))
        assert (rows[column][times] > 0).all()
        rows[column][times] = 0
    return rows.tobytes()


def test_they_are_byte_for_byte_those_of_compiled_code():
    compiled, python = (ring_in_memory(slots=16) for _ in range(2))
    ours = stepped(NativeInterceptor(compiled_part(), {}, compiled), compiled)
    assert ours == stepped(PythonInterceptor({}, python), python)


def test_what_a_collective_gets_later_stands_in_its_row():
    ring = small()
    rows = RingRows(ring)
    at = rows.append(rf.COLLECTIVE, rf.UNWATCHED, a=1, x=8, y=2, b2=-1, op=3, dtype=4, group=5)
    rows.add_flags(at, rf.BY_FUTURE)
    rows.returned(at, 6)
    rows.end(at, 7)
    link = rows.append(rf.LINK, x=at)
    for flags in (rf.BY_FABRIC, 0):
        rows.linked(link, flags, 8, 9)
        stored, _ = ring.rows_since(0)
        assert stored[0].tolist() == (1, rf.COLLECTIVE, rf.UNWATCHED | rf.BY_FUTURE, 3, 4, 5, 0, 1, 7, 8, 2, 6, -1)
        assert stored[1].tolist() == (2, rf.LINK, flags, 0, 0, 0, 0, 8, 9, at, 0, 0, 0)
    for late in (at - 4, NOWHERE):
        rows.add_flags(late, 0xF0)
        rows.returned(late, 0)
        rows.linked(late, 0, 0, 0)
    assert ring.rows_since(0)[0].tobytes() == stored.tobytes()


def test_rows_of_many_threads_have_places_of_their_own():
    ring = small(4096)
    rows, found = RingRows(ring), list[int]()

    def append(thread: int) -> None:
        found.extend(rows.append(rf.RANGE, x=thread, y=number) for number in range(ROWS))

    threads = [threading.Thread(target=append, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(THREADS * ROWS)) == list(range(rows.count()))
    stored, _ = ring.rows_since(0)
    assert (stored["kind"] == rf.RANGE).all()
    for number in range(THREADS):
        assert stored["y"][stored["x"] == number].tolist() == list(range(ROWS))


def test_a_row_that_comes_in_between_has_another_place(monkeypatch):
    ring, pack, inner = small(), module._pack_behind_stamp, list[int]()
    rows = RingRows(ring)

    def interrupted(*what: object) -> None:
        monkeypatch.setattr(module, "_pack_behind_stamp", pack)
        inner.append(rows.append(rf.TAIL, a=1, b=2))
        pack(*what)

    monkeypatch.setattr(module, "_pack_behind_stamp", interrupted)
    outer = rows.append(rf.STALL, a=3, b=4)
    assert (outer, inner, rows.count()) == (0, [1], 2)
    stored, _ = ring.rows_since(0)
    assert stored["kind"].tolist() == [rf.STALL, rf.TAIL]
    assert stored["a"].tolist() == [3, 1]


def test_what_has_left_touches_the_ring_no_more(tmp_path):
    ring = small(path=tmp_path / "rank_0.bin")
    rows = RingRows(ring)
    at = rows.append(rf.AUX)
    before = np.array(ring.rows_since(0)[0])
    rows.leave()
    rows.append(rf.AUX)
    rows.end_span(at)
    assert ring.count == 1
    assert ring.rows_since(0)[0].tobytes() == before.tobytes()
    ring.close()
