"""Every number of a cause stands in the rows that are shown below it: as a value, a difference or a share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.analysis.attribution.records import block, comm, dataset, exact, made_step
from tests.analysis.attribution.test_attribute import computing, late_by, two_pairs, two_ranks
from tests.analysis.by_json import attribute, cause_lines, sentence_rows

_NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(?= (?:ms|%))|(?<![\w.'])(\d+(?:\.\d+)?)(?![\w.'])")
OVERLAP_OFF = {"key": "config.parallel.overlap", "reference": True, "candidate": False}
OVERLAP_ON = {"key": "config.parallel.overlap", "reference": False, "candidate": True}


def cells(found: dict[str, Any]) -> tuple[list[str], list[float]]:
    """Names and numbers of the table as Markdown shows it; shares in per cent."""
    lines = [line.strip("| ").split(" | ") for line in cause_lines(found)[2:]]
    numbers = [abs(float(cell.rstrip("%"))) for line in lines for cell in line[1:] if cell not in ("-", "unknown")]
    return [row["what"] for row in sentence_rows(found)], numbers


def held(found: dict[str, Any]) -> list[str]:
    """The numbers of the sentence, each found in the table, to the digits that the sentence has."""
    said = re.sub(r"Configuration: .*?\. (?=[A-Z\d])", "", found["sentence"])
    if not sentence_rows(found):
        means = [found[side]["exposed_comm_ms"] for side in ("reference", "candidate")]
        names, numbers = [], means
    else:
        names, numbers = cells(found)
    for name in sorted(names, key=len, reverse=True):
        said = re.sub(re.escape(name), "X", said, flags=re.IGNORECASE)
    said = re.sub(r"(forward|backward|passes) of \S+", "X", said)  # a place, named
    tokens = [first or second for first, second in _NUMBER.findall(said)]
    for token in tokens:
        digits = len(token.partition(".")[2])
        # A table has three digits behind the point, and whole per cent.
        least = 0.5 * 10.0**-digits + 0.0005
        assert any(abs(number - float(token)) <= least for number in numbers), (token, found["sentence"], numbers)
    return tokens


def test_of_stragglers_computing_and_places(tmp_path: Path) -> None:
    straggler = attribute(late_by(tmp_path / "a", "base", 0), late_by(tmp_path / "b", "new", 5))
    assert len(held(straggler)) >= 4
    pairs = attribute(two_pairs(tmp_path / "c", "base", 0, 0), two_pairs(tmp_path / "d", "new", 5, 20))
    assert held(pairs)
    shorter = attribute(computing(tmp_path / "e", "base", 20), computing(tmp_path / "f", "new", 8))
    assert held(shorter)
    assert held(attribute(*(two_ranks(tmp_path / name, name) for name in ("g", "h"))))


def one_transfer(folder: Path, label: str, late_ms: float, begin_ms: float) -> Any:
    """An all-reduce of 16 ms on rank 1, for which rank 0 waits `late_ms`, behind or beside 30 ms of backward."""
    ranks = []
    for rank in (0, 1):
        rows = [[comm("allreduce", begin_ms, begin_ms + 16 + late_ms * (rank == 0), 8_000, at)] for at in range(3)]
        blocks = [block("body", "backward", 20, 50)]
        ranks.append([made_step(rank, 2, at, 120, blocks, rows[at]) for at in range(3)])
    return dataset(folder, label, ranks, parallel="ddp")


def test_overlap_turned_off_is_the_cause_and_the_sentence_stops_there(tmp_path: Path) -> None:
    """Hidden: 16 ms on rank 1 and 20 on rank 0, of which 4 are waiting; then nothing is."""
    sides = one_transfer(tmp_path / "a", "on", 4, 25), one_transfer(tmp_path / "b", "off", 4, 60)
    found = attribute(*sides, differences=[OVERLAP_OFF])
    exact(found)
    assert found["sentence"] == (
        "parallel.overlap true -> false. All-reduce now starts after backward: on average 18 ms per step that was "
        "hidden is exposed. Mean exposed time rises by 18 ms: 11 % waiting for peers, 89 % transfer."
    )
    assert held(found) == ["18", "18", "11", "89"]
    back = attribute(*sides[::-1], differences=[OVERLAP_ON])
    assert back["sentence"] == (
        "parallel.overlap false -> true. All-reduce now starts during backward: on average 18 ms per step that was "
        "exposed is hidden. Mean exposed time falls by 18 ms: 11 % waiting for peers, 89 % transfer."
    )
    assert held(back) == held(found)


def test_overlap_turned_off_that_explains_nothing_is_no_cause(tmp_path: Path) -> None:
    """More is exposed because transfers take longer; as much is hidden as before."""
    sides = two_ranks(tmp_path / "a", "base"), two_ranks(tmp_path / "b", "new", slow=3)
    said = attribute(*sides, differences=[OVERLAP_OFF])["sentence"]
    assert "now" not in said
    assert "Configuration: parallel.overlap true -> false." in said


def test_of_other_strategies_it_is_the_waiting_that_overlap_off_brings(tmp_path: Path) -> None:
    def side(label: str, at_ms: float) -> Any:
        rows = [[comm("allgather", at_ms, at_ms + 10, 8_000, number)] for number in range(3)]
        steps = [[made_step(r, 2, n, 120, [block("b", "forward", 0, 40)], rows[n]) for n in range(3)] for r in (0, 1)]
        return dataset(tmp_path / label, label, steps)

    said = attribute(side("on", 5), side("off", 50), differences=[OVERLAP_OFF])["sentence"]
    assert said.startswith(
        "parallel.overlap true -> false. Every collective is now waited for before computing goes on: on average "
        "10 ms per step that was hidden is exposed. Mean exposed time rises by 10 ms: 100 % transfer."
    )


def test_computing_that_is_shorter_stands_beside_what_is_no_longer_hidden(tmp_path: Path) -> None:
    """The all-reduce came too late for 18 ms; the computing is 7.6 ms shorter, which is not called the cause."""
    sides = computing(tmp_path / "a", "base", 27.6), computing(tmp_path / "b", "new", 20, at_ms=70)
    found = attribute(*sides)
    assert found["sentence"].endswith(
        " Hidden: 18 ms less, of 18 -> 18 ms of communication. Computation: 47.6 -> 40 ms (most of the change in "
        "backward of b)."
    )
    assert held(found)
