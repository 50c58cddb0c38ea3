"""Secrets are hidden in every spelling, other values stay, and JSON stays JSON; one that is in any input is
in no file that is written and in nothing that is printed.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import sqlite3
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import fsspec
import msgspec
import pytest
from hydra.core.global_hydra import GlobalHydra
from hypothesis import example, given
from hypothesis import strategies as st

import aorta
from aorta import redaction
from aorta.commands import main
from aorta.redaction import hide, redact, redacted
from tests.analysis.builders import footer, simulated_run, write_manifest
from tests.read.kineto_files import ALLREDUCE, GEMM, document, event, kernel, step
from tests.read.nsys_files import write_nsys
from tests.runs import train

SECRET = "hunter2x"
CASES = json.loads(Path(__file__).with_suffix(".json").read_text())
HIDDEN, OTHERS = dict(CASES["hidden"]), CASES["kept"]


@pytest.mark.parametrize(("text", "shown"), HIDDEN.items())
def test_a_secret_is_hidden_in_every_spelling_and_the_rest_stays(text: str, shown: str) -> None:
    assert redact(text) == redact(shown) == shown
    for indent in (None, 2):
        assert SECRET not in redact(json.dumps([{"a": text, "b": [text, 1]}], indent=indent))


README = (Path(__file__).resolve().parents[1] / "artifacts" / "README.md").read_text()
PROMISED = {
    row.partition(":")[0]: re.findall(r"`([^`]+)`", row.partition(" | ")[0])
    for row in README.partition("| a secret is |")[2].partition("\n\n")[0].split("\n| ")[1:]
}
SPELLINGS: dict[str, Callable[[str, str], str]] = {
    "JSON": lambda name, value: json.dumps({name: value}),
    "list in JSON": lambda name, value: json.dumps([{name: ["a b", value]}], indent=2),
    "JSON in JSON": lambda name, value: json.dumps(json.dumps({name: value, "b": [{name: [value, "c"]}]})),
    "document": lambda name, value: json.dumps(redacted({name: {"a": [value], "b": value}})),
    "line in JSON": lambda name, value: json.dumps(f"a\n{value}" if name == "x" else f"a\n{name}={value}"),
    "YAML": lambda name, value: f"a: b\n{name}: {value}\nc: d\n",
    "list in YAML": lambda name, value: f"{name}: [a, {value}]\n",
    "block in YAML": lambda name, value: f"{name}:\n  - a\n  - {value}\nc: d\n",
    "list at the margin in YAML": lambda name, value: f"{name}:\n- a\n- {value}\nc: d\n",
    "text in YAML": lambda name, value: f"{name}: |\n  a\n  {value}\nc: d\n",
    "YAML in JSON": lambda name, value: json.dumps([f"{name}:\n  a: b\n  c: {value}\nd: e"]),
    "TOML": lambda name, value: f'{name} = "{value}"\n',
    "list in TOML": lambda name, value: f'{name} = ["a", "{value}"]\n',
    "text in TOML": lambda name, value: f'{name} = """\n{value}"""\n',
    "argv": lambda name, value: " ".join(
        hide(["run", f"--{name}", value, f"--{name}={value}", f"{name}={value}", "c"])
    ),
    "argv in JSON": lambda name, value: json.dumps(["run", f"--{name}", value]),
    "URL in a URL": lambda name, value: (
        f"https://h/x?to=a%3D{value}" if name == "x" else f"https://h/x?to=a&{name}={value}"
    ),
    "URL": lambda name, value: f"https://h/x?a=b&{name}={value}&c=d",
    "header": lambda name, value: f"curl -H 'X-{name}: {value}' h",
}


@pytest.mark.parametrize("spelled", SPELLINGS.values(), ids=SPELLINGS)
def test_what_the_table_promises_is_hidden_in_every_spelling(spelled: Callable[[str, str], str]) -> None:
    named, parameters, tokens, passwords, *_ = PROMISED.values()
    assert {word for word in redaction.NAMES if any(re.search(redaction.NAMES[word], n.lower()) for n in named)} == {
        *redaction.NAMES
    } - {"sig"}
    assert set(tokens) == set(redaction._SHAPED)
    url = spelled is SPELLINGS["URL"]
    left = [text for name in named + parameters * url if "h0rse" in (text := redact(spelled(name, "h0rsePass7")))]
    for begin in tokens:
        token = begin + ("aB3dE6gH9.aB3dE6gH9.aB3dE6gH9" if begin == "eyJ" else "aB3dE6gH9" * 4)
        left += [text for text in [redact(spelled("x", token))] if token[len(begin) :] in text]
    for password in passwords:
        for text in (password, f"run '{password}' --now", json.dumps([password, 1])):
            left += [shown for shown in [redact(text.replace("PW", "h0rsePass7"))] if "h0rse" in shown]
        words = password.replace("PW", "h0rsePass7").split(" ")
        left += [str(shown) for shown in [hide(words)] if "h0rse" in " ".join(shown)]
    assert left == []


@pytest.mark.parametrize(
    "rule", [*redaction._RULES.values(), *redaction._SHAPED.values()], ids=lambda rule: rule.pattern[:9]
)
def test_the_work_of_a_rule_grows_with_the_length_alone(rule: re.Pattern[str]) -> None:
    """Of a text 16 times as long: 16 times, and 256 times where the work is quadratic."""

    def work_s(unit: str, length: int) -> float:
        text, best_s = (unit * length)[:length], math.inf
        for _ in range(3):
            begun_s = time.process_time()
            deque(rule.finditer(text), maxlen=0)
            best_s = min(best_s, time.process_time() - begun_s)
        return best_s

    words = [word for word, own in (redaction._RULES | redaction._SHAPED).items() if own is rule]
    marks = ["", *'-:="[', "'", "\\", ",a:", "(a:", ": [a,", ": ['a','", ":\n  - ", " x ", ".aaaaaaaa", "--a"]
    for unit in (word + mark for word in words for mark in marks):
        growths = (work_s(unit, 128_000) / work_s(unit, 8_000) for _ in range(4))
        assert any(growth < 60 for growth in growths), unit


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, str]], None]]:
    """Sets variables of the environment, whose values are secrets where their names say so."""

    def known(values: dict[str, str]) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        redaction._values.cache_clear()

    yield known
    redaction._values.cache_clear()


def test_keys_numbers_and_names_of_a_document_stay(variables: Callable[[dict[str, str]], None]) -> None:
    document = {
        "world_size": 26214400,
        "label": "hf_llama3_70b_baseline",
        "sort_key": "world_size",
        "model": {"num_key_value_heads": 8, "max_tokens": 4096, "all_reduce": [1.5, None, True]},
    }
    named = {"SORT_KEY": "world_size", "MAX_TOKEN_BYTES": "26214400", "A_PASSWORD": "all_reduce"}
    variables({**named, "B_TOKEN": "26214400", "C_SECRET": "num_key_value_heads"})
    assert redacted(document) == document
    assert redact(json.dumps(document)) == json.dumps(document)
    left, right = (hide(["train.py", f"model.num_key_value_heads={heads}"]) for heads in (8, 16))
    assert left != right


def test_other_values_stay() -> None:
    two_lines = "no viable input 'A_TOKEN='\n  in: a value with 'x'"  # quotes do not reach into another line
    assert {text: redact(text) for text in (*OTHERS, two_lines) if redact(text) != text} == {}
    assert redact(json.dumps(OTHERS)) == json.dumps(OTHERS)


_PIECES = [
    *HIDDEN,
    *OTHERS,
    *redaction.NAMES,
    *redaction._RULES,
    *"\"\\'=:,[]{}@/- \n",
    "ü",
    "\\\\",
    "', ",
    "\U0001f600",
]
_TEXTS = st.lists(st.sampled_from(_PIECES)).map("".join)


@given(st.recursive(_TEXTS | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(_TEXTS, inner)))
@example({"https://me:hunter2x@h": "token:\\"})  # a backslash that ends a text is no quote of a text in it
@example(["--token', ", "a"])  # nor is the quote that ends it the first of another word
@example(["--token', \\", "password=\U0001f600"])
def test_json_stays_json(document: object) -> None:
    for text in (json.dumps(document), json.dumps(document, indent=1), json.dumps(json.dumps(document))):
        shown = json.loads(redact(text))
        assert _outline(shown) == _outline(json.loads(text))
    lines = f"{json.dumps(document)}\n{json.dumps([document], ensure_ascii=False)}\n"
    assert len([json.loads(line) for line in redact(lines).splitlines()]) == 2
    json.loads(f"[{redact(f'{json.dumps(document)},{json.dumps(document)}', part_of_json=True)}]")


def _outline(document: object) -> object:
    """A document with its texts, and keys, left out: those that differ in secrets alone may be equal without them."""
    if isinstance(document, dict):
        return {}
    return [_outline(value) for value in document] if isinstance(document, list) else isinstance(document, str)


def test_values_of_the_environment_are_hidden_wherever_they_stand(
    variables: Callable[[dict[str, str]], None],
) -> None:
    kept = {"GIT_AUTHOR_NAME": "somebody else", "OLDPWD": "/some/where", "SSH_AUTH_SOCK": __file__, "A_TOKEN": "true"}
    variables({**kept, "MY_TOKEN": 'top "secret" 1'})
    for text in ('a top "secret" 1 b', 'a top \\"secret\\" 1 b', "a top%20%22secret%22%201 b"):
        assert redact(text) == "a ... b"
    assert all(redact(value) == value for value in kept.values())


CANARY = "c4n4ry-hunter2"
URL = f"s3://me:{CANARY}@bucket/x"
SHOWN_URL = "s3://me:...@bucket/x"
EVENTS = [
    *(step(1, 0, 100), kernel(GEMM, 10, 40), kernel(ALLREDUCE, 30, 50, stream=20)),
    *(step(2, 100, 100), kernel(GEMM, 110, 40), kernel(ALLREDUCE, 130, 50, stream=20)),
    event("user_annotation", f"fetch {URL}", 5, 20, 4242, 4242, url=URL, HF_TOKEN=CANARY),
    {"ph": "M", "name": "process_name", "pid": 4242, "tid": 0, "args": {"name": f"python --hf-token {CANARY}"}},
]
FACTS = {"environment": {"HF_TOKEN": CANARY, "HIP_DB_PASS": CANARY}, "command": f"train --password {CANARY}"}


def trace(place: Path | str) -> str:
    """A trace with the secret in names, in arguments, in the name of its process and in its metadata."""
    with fsspec.open(str(place), "wb") as file:
        file.write(json.dumps(document(EVENTS, **FACTS)).encode())
    return str(place)


def in_memory(address: str) -> Callable[[Path], str]:
    return lambda _there: trace(address)


def records(there: Path) -> str:
    """A run of somebody else's, whose record, error and manifest have the secret."""
    folder = there / f"run{len(list(there.iterdir()))}"
    simulated_run(folder, label="theirs", ranks=2, steps=5)
    path = folder / "rank_1_metrics.jsonl"
    end = footer(5, 2, reason="error", exit_code=1, error=f"ConnectionError: {URL} PGPASSWORD={CANARY}")
    lines = path.read_text().splitlines()[:-1]
    path.write_text("\n".join([*lines, msgspec.json.encode(end).decode()]) + "\n")
    environment = {"NCCL_NET": f"tcp://a:{CANARY}@h", "HIP_DB_PASS": CANARY}
    config = {"workload": {"name": "mlp"}, "profiling": {"remote_root": URL}}
    write_manifest(folder, config, world_size=2, command=["train.py", f"remote={URL}"], environment=environment)
    return str(folder)


def nsys(there: Path) -> str:
    write_nsys(there / "n.sqlite")
    with sqlite3.connect(there / "n.sqlite") as db:
        db.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('HF_TOKEN', ?)", (CANARY,))
        db.execute("UPDATE NVTX_EVENTS SET text = ? WHERE rowid = 1", (f"fetch {URL}",))
    return str(there / "n.sqlite")


def config(text: str) -> Callable[[Path], str]:
    def written(there: Path) -> str:
        (there / "a.yaml").write_text(f"defaults: [default, _self_]\n{text}\n")
        return str(there / "a.yaml")

    return written


TOLD = "import sys; print('HF_TOKEN=' + sys.argv[-1]); sys.exit('Error: no login at ' + sys.argv[1])"
AB = ("ab", "--output", "plan", "--no-report", "--launches", "2", f"python={sys.executable}")
SAID = ("--command", f'{sys.executable} -c "{TOLD}" {URL} --password {CANARY}')
GATE = ("--all", "--fail-on", "job_step_ms>5%", "--markdown", "gate.md")
USER, HIDDEN_USER = f"http://u:{CANARY}@h", "http://u:...@h"
SET = ("--reference", f"env.HF_TOKEN={CANARY}", f"profiling.remote_root={URL}")
Word = str | Callable[[Path], str]
PLACES: dict[str, tuple[tuple[Word, ...], str]] = {
    "password of a remote folder": (("train", f"profiling.remote_root={URL}"), "holds a password"),
    "value of an unknown key": (("train", f"+x.HF_TOKEN={CANARY}"), "'HF_TOKEN': '...'"),
    "value that is refused": (("train", f"training.device={USER}"), HIDDEN_USER),
    "option that is not there": (("train", f"--hf-token={CANARY}"), "--hf-token=..."),
    "argument of an option": (("train", "--password", CANARY), "no such option"),
    "configuration shown": (("train", "--cfg", "job", f"profiling.remote_root={URL}"), f": {SHOWN_URL}"),
    "sweep": (("train", "-m", f"label=a,b://u:{CANARY}@h", f"HF_TOKEN={CANARY}"), "HF_TOKEN=..."),
    "secret in a configuration": (("train", "--config", config(f"api_key: {CANARY}")), "Key 'api_key' not in"),
    "configuration that is no YAML": (("train", "--config", config(f"password: '{CANARY}\nx: ]")), "cannot be read"),
    "name of a configuration": (("train", "--config", f"{USER}/x.yaml"), "no such file"),
    "URL of a trace": (("report", in_memory(f"memory://me:{CANARY}@h/t.json"), "--all"), "memory://me:...@h"),
    "parameter of a URL": (("report", in_memory(f"memory://h/t.json?token={CANARY}")), "t.json?token=..."),
    "merged traces": (("merge", lambda there: trace(there / "t.json"), "-o", "merged.json.gz"), f"fetch {SHOWN_URL}"),
    "environment in an export of nsys": (("report", nsys, "--all"), "overlap"),
    "record and manifest": (("report", records, "--all"), f"ConnectionError: {SHOWN_URL}"),
    "two records": (("report", "--reference", records, "--candidate", records, *GATE), SHOWN_URL),
    "what-if of a record": (("whatif", records), ""),
    "cluster": (("report", records, "--scheduler", f"tls://u:{CANARY}@127.0.0.1:9"), "tls://u:...@127.0.0.1:9"),
    "no option of a command": (("report", str, f"--api-key={CANARY}"), "--api-key=..."),
    "command of aorta ab": ((*AB, *SAID), SHOWN_URL),
    "words of aorta ab": ((*AB, "--dry-run", *SET), "HF_TOKEN=..."),
    "evidence of a hang": (("autopsy", f"{USER}/dumps"), f"{HIDDEN_USER}/dumps"),
}
"""A command, of whose words some make a file in a folder, and what is seen in its place."""


def written(folder: Path) -> dict[str, bytes]:
    """Every file, unpacked, and its name."""
    found = {}
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        packed = path.suffix == ".gz" and content
        found[str(path.relative_to(folder))] = gzip.decompress(content) if packed else content
    return found


@pytest.mark.parametrize(("words", "seen"), PLACES.values(), ids=PLACES)
def test_a_secret_in_any_input_comes_out_nowhere(
    words: tuple[Word, ...], seen: str, tmp_path: Path, monkeypatch, capfd
) -> None:
    there, here = tmp_path / "given", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "argv", ["aorta"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    GlobalHydra.instance().clear()
    with suppress(SystemExit):  # argparse, and Hydra after --cfg
        main([word if isinstance(word, str) else word(there) for word in words])
    files, said = written(here), "".join(capfd.readouterr())
    assert CANARY not in said
    assert [name for name, content in files.items() if CANARY in name or CANARY.encode() in content] == []
    assert seen in said or any(seen.encode() in content for content in files.values()), said


def test_what_a_run_records_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # the other tests load none

    secrets = {"NCCL_NET": f"tcp://a:{CANARY}@h", "GLOO_X": f"token={CANARY}"}
    for name, value in {**dict.fromkeys(("HF_TOKEN", "HIP_DB_PASS"), CANARY), **secrets}.items():
        monkeypatch.setenv(name, value)
    here, model = tmp_path / "here", torch.nn.Linear(4, 4)
    words = ("profiling.remote_root=memory://x", "profiling.enabled=true", "profiling.active=1")
    ran = train(here / "ran", *words, ranks=1)
    assert CANARY not in ran.stdout + ran.stderr
    with pytest.raises(ConnectionError), aorta.record(here / "loop", model=model) as recording:  # noqa: PT012
        with recording.range(f"fetch {URL}"):
            model(torch.ones(1, 4)).sum().backward()
        recording.step()
        raise ConnectionError(f"no answer of {URL} with HF_TOKEN={CANARY}")
    files = written(here)
    assert [name for name, content in files.items() if CANARY in name or CANARY.encode() in content] == []
    assert b"tcp://a:...@h" in files["ran/run.json"]
    assert SHOWN_URL.encode() in files["loop/rank_0_metrics.jsonl"]


def test_a_name_that_ends_like_a_secret_breaks_no_merged_trace(tmp_path: Path) -> None:
    place = tmp_path / "t.json"
    name = "token:\\"  # in JSON a second backslash follows, and behind the quote braces
    place.write_text(json.dumps(document([*EVENTS, event("user_annotation", name, 5, 20, 4242, 4242)])))
    assert main(["merge", str(place), "-o", str(tmp_path / "merged.json")]) == 0
    merged = json.loads((tmp_path / "merged.json").read_text())
    assert name in {event.get("name") for event in merged["traceEvents"]}
