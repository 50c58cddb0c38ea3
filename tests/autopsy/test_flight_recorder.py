"""Dumps of torch's Flight Recorder: real ones of a job over gloo that hangs, and ones of NCCL as torch writes them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aorta.autopsy.evidence import ThreadStack
from aorta.autopsy.flight_recorder import read_dumps
from aorta.autopsy.judge import judge
from aorta.errors import InputError
from tests.docs.pages import ROOT, fenced
from tests.runs import program, succeeded

HUNG_JOB = """
import os, sys, threading, time
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json

rank, folder = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo")
pair = dist.new_group([0, 2], group_desc="pair")
x = torch.ones(8)
for _ in range(3):
    dist.all_reduce(x)
if rank != 1:
    dist.all_reduce(x, group=pair)
dist.barrier()
unfinished = lambda: b'"retired":false' in _dump_fr_trace_json()
while unfinished():  # gloo's worker retires the barrier's entry some time after its end
    time.sleep(0.01)
if rank != 1:
    threading.Thread(target=lambda: dist.all_reduce(torch.ones(5)), daemon=True).start()
name = f"{folder}/comm_lib_trace_rank_{rank}"
written = lambda: sum(one.endswith(".json") for one in os.listdir(f"{folder}/json"))
while not (unfinished() if rank != 1 else written() == 2):  # its dump is not older than what the others wait in
    time.sleep(0.01)
for path, content in ((name, _dump_fr_trace()), (f"{folder}/json/rank_{rank}.json", _dump_fr_trace_json())):
    with open(path + ".part", "wb") as file:
        file.write(content)
    os.rename(path + ".part", path)
while written() < 3:
    time.sleep(0.01)
os._exit(0)
"""


@pytest.mark.dist
def test_a_hung_job_over_gloo_is_explained(tmp_path: Path) -> None:
    """Of three ranks rank 1 skips the last all-reduce; AORTA is not in them."""
    (tmp_path / "json").mkdir()
    script = tmp_path / "job.py"
    script.write_text(HUNG_JOB)
    succeeded(program(script, str(tmp_path), ranks=3))
    for paths in (sorted(tmp_path.glob("comm_lib_trace_rank_?")), [tmp_path / "json"]):
        verdict = judge(read_dumps(paths))
        (one,) = verdict.culprits
        assert (one.rank, one.kind) == (1, "rank_did_not_join")
        assert (one.collective.number, one.collective.kind, one.collective.bytes) == (4, "all_reduce", 20)
        assert (verdict.waits[0].ranks, verdict.waits[0].for_ranks) == ([0, 2], [1])


def test_a_dump_older_than_what_others_wait_in_accuses_nobody(tmp_path: Path) -> None:
    """Ranks that are slow and not stuck: the others went on between one dump and the next."""
    write(tmp_path, dumps_of("done0 begun1 | done0"))
    assert [one.rank for one in judge(read_dumps([tmp_path])).culprits] == [1]
    os.utime(tmp_path / "comm_lib_trace_rank_1", ns=(0, CREATED_NS))
    verdict = judge(read_dumps([tmp_path]))
    assert (verdict.culprits, verdict.kind) == ([], "cannot_decide")


@pytest.mark.parametrize("nccl", [None, [], [{"profiling_name": "nccl:all_reduce"}]])
def test_the_dump_of_the_page_is_of_the_backend_that_was_used(
    nccl: list[dict[str, Any]] | None, world_of_one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of gloo, in a build without NCCL, in one that has it, and where NCCL has issued a collective as well."""
    dist.all_reduce(torch.ones(8))
    if nccl is not None:
        dumped = pickle.dumps({"entries": nccl})
        monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: dumped, raising=False)
    (snippet,) = fenced(ROOT / "docs" / "autopsy.md", "python")
    exec(snippet.replace('"/tmp"', f'"{tmp_path}"'), {})
    entries = pickle.loads((tmp_path / "comm_lib_trace_rank_0").read_bytes())["entries"]
    assert entries[-1]["profiling_name"] == ("nccl:all_reduce" if nccl else "gloo:all_reduce")
    if not nccl:
        (evidence,) = read_dumps([tmp_path])
        assert evidence.collectives[-1].kind == "all_reduce"


CREATED_NS = 1_700_000_000_000_000_000
"""When the first collective of a made dump was issued: before its file was written."""


def entry(number: int, state: str, **other: Any) -> dict[str, Any]:
    """An entry as NCCL's process group makes it."""
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "op_id": number + 1,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": CREATED_NS + number,
        "input_sizes": [[10, 10]],
        "input_dtypes": ["Float"],
        "output_sizes": [[10, 10]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None if state == "scheduled" else CREATED_NS + number + 1,
        "time_discovered_completed_ns": CREATED_NS + number + 2 if state == "completed" else None,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": False,
        "frames": [{"name": "step", "filename": "/home/me/loop.py", "line": 7}],
        **other,
    }


def dump(entries: list[dict[str, Any]], ranks: int = 2, **other: Any) -> dict[str, Any]:
    """A dump as torch with NCCL writes it."""
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.3",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}},
        "pg_status": {
            str(group): {
                "last_enqueued_collective": max(numbers, default=2),
                "last_started_collective": 2,
                "last_completed_collective": 1,
            }
            for group in {0, *(row["pg_id"] for row in entries)}
            for numbers in [[row["collective_seq_id"] for row in entries if row["pg_id"] == group]]
        },
        "entries": entries,
        **other,
    }


TIMES = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")
APART_NS = 1_237


def apart(rank: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of a rank, which does nothing in the same nanosecond as another."""
    return [row | {key: row[key] + rank * APART_NS for key in TIMES if row.get(key)} for row in rows]


def write(folder: Path, dumps: Sequence[dict[str, Any] | None], name: str = "comm_lib_trace_rank_{}") -> Path:
    for rank, one in enumerate(dumps):
        if one is not None:
            rows = {"entries": apart(rank, one["entries"])} if "entries" in one else {}
            (folder / name.format(rank)).write_bytes(pickle.dumps(one | rows))
    return folder


def test_names_end_with_the_rank(tmp_path: Path) -> None:
    for name in ("nccl_trace_rank_{}", "nccl_trace_rank_node02_{}", "host.pci3_rank_{}", "dump_{}.pkl"):
        write(tmp_path, [dump([]), dump([])], name)
        assert [one.rank for one in read_dumps([tmp_path / name.format(rank) for rank in (1, 0)])] == [0, 1]


def test_what_entries_say(tmp_path: Path) -> None:
    """A dump of an older torch, with ranks as text and types of two bytes; a message, named by global ranks; and a
    message of a batch, which has the times of the entry that ends it.
    """
    older = dump([entry(0, "started", input_dtypes=["BFloat16"])], version="2.4", nccl_version="2.21.5")
    del older["comm_lib_version"]
    older["pg_config"]["0"]["ranks"] = ["0", "1"]
    config = {"3": {"name": "3", "desc": "pp", "ranks": "[4, 6]"}}
    of_pair = {"is_p2p": True, "collective_seq_id": 0, "process_group": ("3", "pp")}
    send = entry(0, "started", profiling_name="nccl:send 1->0", **of_pair)
    (tmp_path / "rank_6").write_bytes(pickle.dumps(dump([send], pg_config=config, pg_status={})))
    (tmp_path / "rank_7").write_bytes(pickle.dumps(dump(ROWS["sent"])))
    first, alone, batched = read_dumps([write(tmp_path, [older])])
    assert [group.ranks for group in first.groups] == [(0, 1)]
    assert (first.collectives[0].bytes, first.collectives[0].issued_by) == (200, "/home/me/loop.py:7 step")
    assert [(each.kind, each.peer, each.number) for each in alone.collectives] == [("send", 4, 0)]
    assert [(each.kind, each.state, each.started_ns) for each in batched.collectives] == [
        ("send", "completed", CREATED_NS + 2)
    ]


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80", b"\x80\x05.", b"{", b"[]", b'{"version": "3.1"}', b'{"version": {}}', pickle.dumps(_Hostile())],
)
def test_what_is_no_dump_says_why(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace_0"
    path.write_bytes(content)
    (one,) = read_dumps([path])
    assert "trace_0" in one.torn
    assert ("wants to import" in one.torn) == (b"executed" in content)
    assert not (tmp_path / "executed").exists()
    os.truncate(path, 17 << 20)
    (one,) = read_dumps([path])
    assert "larger than 16 MiB" in one.torn


def test_two_dumps_of_one_rank_and_names_without_a_rank_are_refused(tmp_path: Path) -> None:
    for name in ("a_0", "b_0"):
        (tmp_path / name).write_text(json.dumps(dump([])))
    with pytest.raises(InputError, match="two dumps of rank 0"):
        read_dumps([tmp_path])
    (tmp_path / "named").write_text("{}")
    with pytest.raises(InputError, match="ends with its rank"):
        read_dumps([tmp_path / "named"])
    with pytest.raises(InputError, match="no such file"):
        read_dumps([tmp_path / "none"])


def batch(number: int, message: str, state: str) -> list[dict[str, Any]]:
    """A send or receive as `batch_isend_irecv` of NCCL leaves it: the end alone is updated, and not p2p."""
    shared = {"collective_seq_id": 0, "p2p_seq_id": number + 1}
    began = entry(2 * number, "scheduled", profiling_name=f"nccl:{message}", is_p2p=True, **shared)
    return [began, entry(2 * number + 1, state, profiling_name="nccl:coalesced", **shared)]


CAME = {"collective_seq_id": 0, "p2p_seq_id": 1, "profiling_name": "nccl:recv 1<-0", "is_p2p": True}
ROWS: dict[str, list[dict[str, Any]]] = {
    **{f"done{number}": [entry(number, "completed")] for number in range(6)},
    **{f"begun{number}": [entry(number, "started")] for number in range(6)},
    **{f"issued{number}": [entry(number, "scheduled")] for number in range(6)},
    "failed": [entry(1, "started", retired=True)],
    "alone": [entry(1, "scheduled", process_group=("1", "tp"))],
    "gloo": [entry(0, "scheduled", profiling_name="gloo:barrier")],
    "pair": [entry(0, "completed", pg_id=1, process_group=("1", "tp"))],
    "came": [entry(0, "completed", **CAME), entry(0, "started", record_id=1)],
    "sent": batch(0, "send 0->1", "completed"),
    "open": batch(0, "send 0->1", "completed")[:1],
    "received": batch(0, "recv 1<-0", "completed"),
    "unclosed": batch(1, "recv 1<-0", "started")[:1],
    **{
        f"exchange_{name}": [entry(0, "started", profiling_name="nccl:all_to_all", input_sizes=sent, output_sizes=got)]
        for name, sent, got in (("1", [[4]], [[12]]), ("2", [[16]], [[8]]), ("3", [[4]], [[8]]))
    },
}
RANKS = {"pair": "[0, 1]", "alone": "[1]"}
"""Of the group of those entries."""
OTHER: dict[str, dict[str, Any]] = {
    "nothing": dump([], pg_status={}),
    "torn": {"pg_config": {}},
    "empty": {key: value for key, value in dump([], pg_status={}).items() if key != "entries"},  # as torch writes JSON
    "ended_5": dump([], pg_status={"0": {"last_completed_collective": "5"}}),
    "ended_4": dump([], pg_status={"0": {"last_completed_collective": 4}}),
    "gloo_alone": dump(ROWS["gloo"], pg_config={"": {"name": "", "desc": "", "ranks": "[]"}}, pg_status={}),
}


def dumps_of(texts: str) -> list[dict[str, Any]]:
    """A dump of each rank, named, or of named entries."""
    words = [text.split() for text in texts.split("|")]
    config = dump([], len(words))["pg_config"]
    for name in RANKS.keys() & texts.split():
        config["1"] = {"name": "1", "desc": "tp", "ranks": RANKS[name]}
    return [
        OTHER.get(names[0]) or dump([row for name in names for row in ROWS[name]], len(words), pg_config=config)
        for names in words
    ]


JUDGED: dict[str, tuple[str, str, list[int], list[int], str]] = {
    "a device has not begun": ("done0 begun1 | done0 issued1", "rank_did_not_join", [1], [], "has not begun it"),
    "the dump of the late one is torn": ("done0 begun1 | torn", "cannot_decide", [], [1], "rank_1 is torn"),
    "another dump is torn": ("done0 begun1 | done0 | torn", "rank_did_not_join", [1], [], "rank_2 is torn"),
    "an empty dump": ("begun0 | empty", "rank_did_not_join", [1], [], ""),
    "of unfinished work, status behind": ("begun4 | ended_4", "rank_did_not_join", [1], [], ""),
    "of unfinished work, status ahead": ("begun4 | ended_5", "stuck_inside", [0], [], ""),
    "messages not yet closed to a batch": ("sent | received unclosed", "rank_did_not_join", [0], [], ""),
    "messages without finished work": ("open | begun0", "cannot_decide", [], [0], "lacks entries or finished work"),
    "retired unfinished: it failed, and is open": ("done0 failed | done0 begun1", "stuck_inside", [], [], ""),
    "it may wait in something lost": ("done0 begun5 | issued5", "cannot_decide", [], [1], "lacks entries"),
    "a group of its own": ("done0 begun1 | done0 alone", "rank_did_not_join", [1], [], ""),
    "a message that came was sent": ("nothing | came", "cannot_decide", [], [0], ""),
    "what is open is lost": ("done0 begun1 issued2 | done0 issued2", "cannot_decide", [], [1], ""),
    "two backends": ("pair | pair | gloo", "cannot_decide", [], [2], "is of gloo"),
    "of one gloo rank, which lists no others": ("gloo_alone", "cannot_decide", [], [], ""),
    "not begun, and nobody waits": ("issued0 | done0", "cannot_decide", [], [0], ""),
    "what ranks send to each other differs": ("exchange_1 | exchange_2", "stuck_inside", [], [], ""),
    "what all send and receive differs": ("exchange_3 | exchange_2", "signature_mismatch", [], [0, 1], ""),
}
"""What is wrong, dumps of ranks 0, 1, ..., the verdict's kind, culprits and suspects, and what it says of them."""


@pytest.mark.parametrize("name", JUDGED)
def test_what_dumps_lead_to(name: str, tmp_path: Path) -> None:
    texts, kind, culprits, suspects, said = JUDGED[name]
    evidence = read_dumps([write(tmp_path, dumps_of(texts))])
    verdict = judge(evidence)
    accused = [one.rank for one in verdict.culprits]
    assert (verdict.kind, accused, verdict.suspects) == (kind, culprits, suspects)
    torn = [one.torn or "" for one in evidence]
    assert said in " ".join([*(one.reason for one in verdict.culprits), *verdict.notes, *torn])


PUBLIC = json.loads(Path(__file__).with_name("public_dumps.json").read_text())
"""Dumps with fields that torch never updates, one for each rank that left one, with the verdict that is right by
construction (`culprits`: rank -> why; `says`: words of its notes), and in `stacks` the innermost frames of a rank's
main thread. NCCL's messages of a batch share a `p2p_seq_id`, have no events and stay scheduled; an entry `coalesced`
ends it and is updated. gloo's work stays scheduled until it is `retired`.
"""


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in PUBLIC])
def test_the_verdict_on_public_dumps_is_right(case: dict[str, Any], tmp_path: Path) -> None:
    newest_ns = max(row["time_created_ns"] for one in case["dumps"] if one is not None for row in one["entries"])
    for path in write(tmp_path, case["dumps"], "nccl_trace_rank_{}").iterdir():
        os.utime(path, ns=(0, newest_ns + 60_000_000_000))
    evidence = read_dumps([tmp_path])
    for rank, frames in case.get("stacks", {}).items():
        evidence[int(rank)].stacks = [ThreadStack(name="MainThread", frames=tuple(frames))]
    verdict = judge(evidence)
    culprits = {str(culprit.rank): culprit.reason for culprit in verdict.culprits}
    assert {"kind": verdict.kind, "culprits": culprits} == case["expect"]
    assert case.get("says", "") in "".join(verdict.notes)


PIPELINES = json.loads(Path(__file__).with_name("pipeline_dumps.json").read_text())
"""A pipeline of four stages whose rank 2 departs in the third step, or none does, as the simulated device left it: of
each rank's entries state, group, number, number among messages, name and whether it is a message; of each group what
was enqueued, started and completed last. `untimed`: the answer without TORCH_NCCL_ENABLE_TIMING, by which the circle of
a rank that skipped a message is seen.
"""


def pipeline_dumps(case: dict[str, Any], *, timed: bool) -> list[dict[str, Any]]:
    config = {name: {"name": name, "desc": desc, "ranks": str(ranks)} for name, (desc, ranks) in case["groups"].items()}
    dumps = []
    for one in case["ranks"]:
        entries = []
        for number, (state, group, collective, message, title, is_p2p) in enumerate(one["entries"]):
            known = "scheduled" if state == "started" and not timed else state
            row = entry(number, known, pg_id=int(group), process_group=(group, case["groups"][group][0]), is_p2p=is_p2p)
            row |= {"profiling_name": f"nccl:{title}", "collective_seq_id": collective, "p2p_seq_id": message}
            entries.append(row if timed else row | {"time_discovered_started_ns": None})
        status = {
            group: {
                "last_enqueued_collective": enqueued,
                "last_started_collective": started if timed else -1,
                "last_completed_collective": completed,
            }
            for group, (enqueued, started, completed) in one["status"].items()
        }
        dumps.append(dump(entries, pg_config=config, pg_status=status))
    return dumps


def cut_short(whole: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Dumps of rings that kept few entries, and of unfinished work only: of one rank, and of all."""
    shorter = [[{**one, "entries": one["entries"][-kept:]} for one in whole] for kept in (1, 2, 3, 4, 5, 7, 10)]
    shorter.append(
        [{**one, "entries": [row for row in one["entries"] if row["state"] != "completed"]} for one in whole]
    )
    for cut in shorter:
        yield cut
        yield from ([cut[at] if at == rank else one for at, one in enumerate(whole)] for rank in range(len(whole)))


@pytest.mark.parametrize("form", ["untimed", "timed"])
@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in PIPELINES])
def test_a_pipeline_is_judged_by_its_dumps_whole_and_cut_short(case: dict[str, Any], form: str, tmp_path: Path) -> None:
    whole = pipeline_dumps(case, timed=form == "timed")
    evidence = read_dumps([write(tmp_path, whole)])
    verdict, (expected, culprits) = judge(evidence), case[form].values()
    assert (verdict.kind, {str(one.rank): one.reason for one in verdict.culprits}) == (expected, culprits)
    for cut in cut_short(whole):
        less = judge(read_dumps([write(tmp_path, cut)]))
        assert [one.rank for one in less.culprits] in ([], [int(rank) for rank in culprits])
        # Of a batch of messages without its end nobody knows whether it is over: then nothing is decided, and said.
        open_ended = any("lacks entries or finished work" in note for note in less.notes)
        assert culprits or less.kind == expected or (open_ended and less.kind == "cannot_decide")
