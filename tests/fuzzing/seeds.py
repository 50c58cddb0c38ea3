"""What the doors are given before it is changed: folders from the builders and the corpora of the tests.

A function of this module writes one folder a seed below the folder it gets. Tests' modules are imported inside, as the
torch-free doors may not meet torch. Must not: write anything large, because every case copies it.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import sqlite3
import tarfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
CORPORA: Final = ROOT / "tests" / "analysis"


def _put(folder: Path, name: str, content: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _each(folder: Path, files: Iterable[Path], name: str = "") -> None:
    """A seed for each file; SQL becomes the database that it makes."""
    for file in files:
        target = folder / file.stem / (name or file.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".sql":
            with suppress(sqlite3.Error):
                database = sqlite3.connect(target.with_suffix(".db"))
                database.executescript(file.read_text())
                database.close()
        else:
            target.write_bytes(file.read_bytes())


def _packings(folder: Path, stem: str, text: bytes) -> None:
    _put(folder / f"{stem}-json", "rank0.json", text)
    _put(folder / f"{stem}-gz", "rank0.json.gz", gzip.compress(text))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        member = tarfile.TarInfo("rank0.json")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    _put(folder / f"{stem}-tar", "rank0.tar.gz", out.getvalue())


def kineto(folder: Path) -> None:
    """Traces of torch.profiler: in every packing, one rank and two."""
    from tests.analysis.load.kineto_files import ALLREDUCE, GEMM, document, event, kernel, step

    events = [
        step(3, 1000, 1000),
        step(4, 2000.5, 1000),
        event("cpu_op", "c10d::allreduce_", 1005, 20, 4242, 4242, Collective_name="allreduce", In_msg_nelems=1024),
        event("cuda_runtime", "cudaLaunchKernel", 1010, 5, 4242, 4242, correlation=7),
        kernel(GEMM, 1100, 400.25, correlation=6, External_id=4),
        kernel(ALLREDUCE, 1300, 500, stream=20, correlation=7, Process_Group_Name="0", Group_size=2, dtype="BFloat16"),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 1900, 10, 0, 7, bytes=4096),
        kernel(GEMM, 2100, 400, correlation=9),
        {"ph": "M", "name": "process_name", "pid": 4242, "tid": 0, "ts": 0, "args": {"name": "python3"}},
        {"ph": "s", "id": 7, "pid": 4242, "tid": 4242, "ts": 1011, "cat": "ac2g", "name": "ac2g"},
    ]
    _packings(folder, "one", json.dumps(document(events), indent=1).encode())


def rocprofv3(folder: Path) -> None:
    """Output of rocprofv3: JSON, and CSV in the variants of its versions."""
    from tests.analysis.load.rocprof_files import as_csv, as_json

    _put(folder / "json", "4242_results.json", json.dumps(as_json()).encode())
    _put(folder / "json-gz", "4242_results.json.gz", gzip.compress(json.dumps(as_json()).encode()))
    for variant in ("direct", "rocm-6.2", "convert", "quoted"):
        for name, text in as_csv(variant).items():
            _put(folder / variant, name, text)
    _each(folder, [*CORPORA.glob("load/corpus/json-*"), *CORPORA.glob("load/corpus/csv-*")])


def databases(folder: Path) -> None:
    """SQLite: rocpd of rocprofv3, exports of nsys."""
    from tests.analysis.load.nsys_files import write_nsys
    from tests.analysis.load.rocprof_files import write_rocpd

    for name, write in (("rocpd", write_rocpd), ("nsys", write_nsys)):
        (folder / name).mkdir()
        write(folder / name / f"{name}.db")
        _put(folder / f"{name}-gz", f"{name}.db.gz", gzip.compress((folder / name / f"{name}.db").read_bytes()))
    _each(folder, CORPORA.glob("load/corpus/*.sql"))


def records(folder: Path) -> None:
    """Run folders: simulated training, device samples, and everything of the corpus."""
    from aorta.records.schema import AuxRange, DeviceSample, DeviceTelemetry
    from tests.analysis.builders import collective, header, metrics, simulated_run, step, write_manifest, write_rank

    (folder / "simulated").mkdir()
    simulated_run(folder / "simulated", label="base", ranks=2, steps=5, warmup=1)
    for rank in range(2):
        steps = [
            step(
                rank,
                2,
                number,
                overlap=metrics(10, 8, 4, 2),
                warmup=number == 0,
                collectives=[collective(seq=number), collective("allgather", number, 1.0, 3.0)],
                aux=[AuxRange("optimizer", 1, 5)],
                device=[_sample(DeviceSample, 10**9 * (number + 1) + 5, "power")],
                rocm_smi_output="GPU[0]\t\t: Temperature (Sensor edge) (C): 31.0",
            )
            for number in range(3)
        ]
        (folder / "devices").mkdir(exist_ok=True)
        telemetry = DeviceTelemetry("amdsmi", 1.0)
        write_rank(folder / "devices", header(rank, 2, device_telemetry=telemetry), steps)
    write_manifest(folder / "devices", world_size=2)
    _each(folder, (ROOT / "tests" / "corpus" / "jsonl").glob("*.jsonl"), "rank_0_metrics.jsonl")


def _sample(kind: Any, at_ns: int, *throttle: str) -> Any:
    return kind(at_ns, at_ns + 1000, 65.0, 139.5, 1500.0, 900.0, 87.0, 8 << 30, list(throttle))


def traces(folder: Path) -> None:
    """All formats of traces."""
    for part in (kineto, rocprofv3, databases):
        own = folder.with_name(f"{folder.name}-{part.__name__}")
        own.mkdir()
        part(own)
        for seed in own.iterdir():
            seed.rename(folder / f"{part.__name__}-{seed.name}")


def launches(folder: Path) -> None:
    """Two launch sets, as a plan leaves them."""
    from tests.analysis.compare.builders import launch_set

    launch_set(folder / "sets" / "reference", [0.5, 0.52, 0.51, 0.5])
    launch_set(folder / "sets" / "candidate", [0.4, 0.41, 0.42, 0.4])
    launch_set(folder / "other" / "reference", [0.5, 0.52])
    launch_set(folder / "other" / "candidate", [0.4, 0.5], config={"workload": {"name": "other"}})


def merge(folder: Path) -> None:
    """Run folders with traces, records and clocks; and the corpus of merging."""
    from tests.analysis.merge.test_tracks import run_folder

    run_folder(folder / "run")
    _each(folder, sorted(CORPORA.glob("merge/corpus/*/*.json")), "rank0.json")


def rpc(folder: Path) -> None:
    """A run of remote calls: two workers, and the driver's facts."""
    import msgspec

    from aorta.records.run_files import CALLS_FILE, RPC_FILE, Call, RpcFacts, Worker
    from tests.analysis.merge.traces import BASE_NS, text, x

    facts = RpcFacts(1, [Worker(0, "driver"), Worker(1, "helper")], 0, 1, True, True, {"1": "killed"}, None)
    _put(folder / "whole", RPC_FILE, msgspec.json.encode(facts))
    for worker in range(2):
        place = folder / "whole" / "torch_profiler" / f"worker{worker}"
        call = Call(f"{worker}-1", "job", "sync", "f", worker, 1 - worker, 0, None, BASE_NS + 1, True, BASE_NS + 5000)
        _put(place, CALLS_FILE.format(window=0), msgspec.json.encode(call) + b"\n")
        events = [
            x("rpc_sync#f", 1, 4, cat="user_annotation"),
            x(f"job call={1 - worker}-1", 2, 2, cat="user_annotation"),
            {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 3, "args": {"Bytes": 64, "Device Type": 0}},
        ]
        head = {"rpcWorker": {"id": worker, "name": f"w{worker}"}, "profile_memory": 1}
        _put(place, "rpc_window_0000.json", text(events, rank=worker, **head))


def sweep(folder: Path) -> None:
    """The folder of a sweep, with its jobs' runs."""
    from tests.analysis.compare.builders import launch

    jobs = [[f"a={first}", f"b={second}"] for first in (1, 2) for second in ("x", "y")]
    lines = []
    for number, words in enumerate(jobs):
        name = f"{number:02d}"
        launch(folder / "four" / name, 0.2 + number / 10, ranks=1)
        lines.append(json.dumps({"job": name, "words": words, "exit_code": 0, "seconds": 1.5, "reason": None}))
    _put(folder / "four", "sweep.jsonl", "".join(f"{line}\n" for line in lines).encode())


def plan(folder: Path) -> None:
    """A plan as it is asked for (YAML), and the folder of one that was begun."""
    text = """\
output: plan
launches: 4
nproc_per_node: 2
words: [training.max_steps=40]
environment: {NCCL_ALGO: Ring}
reference: {words: "parallel=ddp"}
candidate: {words: [parallel=fsdp], environment: {NCCL_ALGO: Tree}}
"""
    _put(folder / "asked", "plan.yaml", text.encode())
    _put(folder / "begun", "plan.yaml", text.encode())
    host = {"name": "n", "machine": "m", "cpus": 2}
    asked = {"plan_version": 2, "asked": {"launches": 4}, "versions": {}, "environment": {}, "host": host}
    events: list[Mapping[str, object]] = [
        {"event": "open", "time": "t"},
        {"event": "start", "id": 1, "launch": "reference/00", "time": "t"},
        {"event": "end", "id": 1, "launch": "reference/00", "outcome": "done", "run_id": "r", "seconds": 2.5},
        {"event": "start", "id": 2, "launch": "candidate/00", "time": "t"},
    ]
    _put(folder / "begun", "plan/plan.json", json.dumps(asked).encode())
    _put(folder / "begun", "plan/journal.jsonl", "".join(json.dumps(event) + "\n" for event in events).encode())
    _put(folder / "begun", "plan/reference/00/run.json", json.dumps({"run_id": "r", "world_size": 2}).encode())


def configuration(folder: Path) -> None:
    """Words of `train.py`, one a line, and configuration files of a user's own."""
    words = (
        "profiling.enabled=true profiling.wait=1 profiling=template profiling.trace_name=rank{rank}/{batch:06d}.json",
        "--override training.max_steps=5 dataset.num_samples=64 --override distributed.mode=fsdp parallel.tensor=2",
        "fabric=emulated fabric.latency_us=50 telemetry.devices=[host] scheduler.warmup_steps=null +extra=1 ~compile",
    )
    own = "defaults: [default, _self_]\ntraining:\n  max_steps: 9\nlabel: own\nparallel:\n  overlap: true\n"
    older = "training:\n  max_steps: 9\nmodel: {model_dim: 64}\nfsdp:\n  sharding_strategy: full_shard\n"
    for number, line in enumerate(words):
        _put(folder / str(number), "words.txt", "\n".join(line.split(" ")).encode())
    for name, text in (("own", own), ("older", older), ("list", "- a\n- &x [1, 2]\n- *x\n")):
        _put(folder / name, "mine.yaml", text.encode())
        _put(folder / name, "words.txt", b"--config\nmine.yaml\ntraining.seed=3")


def words(folder: Path) -> None:
    """Words that AORTA takes apart itself, one a line."""
    lines = """all
0, 2,4
rank{rank}.{batch:06d}.json
{run_name!r:>20}{epoch_wct:.3f}
fsdp.backward_prefetch=BACKWARD_PRE
--override=a.b='c d'
artifacts/*/rank?.json"""
    _put(folder / "lines", "words.txt", lines.encode())


def checkpoints(folder: Path) -> None:
    """A checkpoint of a small model, as training leaves it."""
    from tests.fuzzing.checkpointed import checkpointed

    with checkpointed(folder / "one") as (kept, _):
        kept.save(3)
    (folder / "several" / "step_12").mkdir(parents=True)
    shutil.copytree(folder / "one" / "step_3", folder / "several" / "step_3")


def smi(folder: Path) -> None:
    """What the programs of AMD devices print."""
    text = b"GPU[0]\t\t: Temperature (Sensor edge) (C): 31.0\nGPU[0]\t\t: Average Graphics Package Power (W): 12.0\n"
    _put(folder / "text", "out.txt", text)
    _put(
        folder / "json",
        "out.txt",
        b'WARNING: x\n{"card0": {"Temperature (Sensor edge) (C)": "31.0", "GPU use (%)": "7"}}',
    )
