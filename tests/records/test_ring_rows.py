"""Rows that Python appends are those of compiled code, whoever comes in between."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from aorta.instrument.native.native_interceptor import compiled_rows
from aorta.records import ring_file as rf
from aorta.records import ring_rows as module
from aorta.records.ring_file import RingFile
from aorta.records.ring_rows import NOWHERE, RingRows
from tests.instrument.taps import compiled_part

THREADS, ROWS = 4, 500


def small(slots: int = 4, path: Path | None = None) -> RingFile:
    """A ring of few rows."""
    return RingFile.create(path, slots=slots)


def test_they_are_byte_for_byte_those_of_compiled_code() -> None:
    compiled, python = small(), small()
    ours = compiled_rows(compiled_part(), compiled)
    values = (rf.RANGE, 255, 0xFFFF, 1, -2, 3, -(1 << 63), (1 << 63) - 1, 8)
    for rows in (ours, RingRows(python)):
        begin, end, append = rows.functions()
        for _ in range(5):  # the first is overwritten
            append(*values)
        append(rf.STEP, 1)
        rows.end_step(5, 11, 12)
        rows.end_step(0, 13, 14)
        rows.time_step(4, 21, 22)
        assert begin(rf.AUX, 3, 4) == 6
        end(6)
        end(0)
        end(NOWHERE)
        assert rows.count() == 7
    found = [ring.rows_since(0)[0] for ring in (compiled, python)]
    for rows in found:
        assert 0 < rows["a"][-1] <= rows["b"][-1]
        rows["a"][-1] = rows["b"][-1] = 0
    assert found[0].tobytes() == found[1].tobytes()


def test_what_a_collective_gets_later_stands_in_its_row() -> None:
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


def test_rows_of_many_threads_have_places_of_their_own() -> None:
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


def test_a_row_that_comes_in_between_has_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, pack, inner = small(), module._pack_behind_stamp, list[int]()
    rows = RingRows(ring)

    def interrupted(*what: object) -> None:
        monkeypatch.setattr(module, "_pack_behind_stamp", pack)
        inner.append(rows.append(rf.TAIL, a=1, b=2))
        pack(*what)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_pack_behind_stamp", interrupted)
    outer = rows.append(rf.STALL, a=3, b=4)
    assert (outer, inner, rows.count()) == (0, [1], 2)
    stored, _ = ring.rows_since(0)
    assert stored["kind"].tolist() == [rf.STALL, rf.TAIL]
    assert stored["a"].tolist() == [3, 1]


def test_what_has_left_touches_the_ring_no_more(tmp_path: Path) -> None:
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
