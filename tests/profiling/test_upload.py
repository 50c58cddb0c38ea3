"""Uploads: which errors are tried again, what is never replaced, and that nothing is lost whatever the server does."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import PurePosixPath

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from aorta.errors import ConfigError
from aorta.installation import FILE_SYSTEMS
from aorta.profiling.trace_saver import Job, Moment, SavedFile, Saver, TraceWindow
from aorta.profiling.upload import ATTEMPTS, CHECK, Destination, destination, may_pass
from tests.profiling.windows import files_below, loop, preset

KNOWN = {"run_name": "named", "rank": 0}


class Flaky(MemoryFileSystem):
    """A place whose first writes fail with the errors in `script`."""

    protocol = "flaky"
    store: dict = {}
    script: list = []
    writes = 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    def put_file(self, source, target, **words):
        type(self).writes += 1
        error = self.script.pop(0) if self.script else None
        if error == "after":  # it arrived, and the answer got lost
            super().put_file(source, target, **words)
            raise ConnectionResetError("peer went away")
        if error is not None:
            raise error
        super().put_file(source, target, **words)


@pytest.fixture(autouse=True)
def flaky(monkeypatch):
    monkeypatch.setitem(FILE_SYSTEMS, "flaky", "")
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.store.clear()
    Flaky.script, Flaky.writes = [], 0
    Flaky.clear_instance_cache()
    return Flaky


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(b"x" * 3000)
    return path


def remote(address="flaky://there", **words):
    pauses = []
    return Destination(address, sleep=pauses.append, **words), pauses


@pytest.mark.spec("E11")
def test_a_server_that_fails_twice_gets_it_the_third_time(flaky, source):
    flaky.script = [ConnectionRefusedError("no"), OSError(errno.EBUSY, "slow down")]
    place, pauses = remote()
    assert place.put(source, "/a/b.json") == "flaky://there/a/b.json"  # a leading / is dropped
    assert flaky().cat_file("/there/a/b.json") == source.read_bytes()
    assert (flaky.writes, len(pauses)) == (3, 2)


@pytest.mark.spec("E11")
def test_three_tries_and_no_more(flaky, source):
    flaky.script = [ConnectionRefusedError("no")] * 9
    place, _ = remote()
    with pytest.raises(ConnectionRefusedError):
        place.put(source, "b.json")
    assert flaky.writes == ATTEMPTS == 3


class Http(Exception):
    def __init__(self, status):
        super().__init__(status)
        self.status = status


class HTTPClientError(Exception):
    """As botocore calls what never reached a server."""


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (OSError(errno.EIO, "server"), True),
        (OSError(errno.EBUSY, "slow down"), True),
        (OSError("no number"), True),
        (Http(503), True),
        (Http(429), True),
        (HTTPClientError(), True),
        (Http(403), False),
        (Http(404), False),
        (PermissionError(errno.EACCES, "no"), False),
        (FileNotFoundError(), False),
        (FileExistsError(), False),
        (OSError(errno.EINVAL, "signature"), False),
        (OSError(errno.ENOSPC, "full"), False),
        (ValueError(), False),
    ],
)
@pytest.mark.spec("E11")
def test_only_what_may_pass_is_tried_again(flaky, source, error, passes):
    assert may_pass(error) is passes
    flaky.script = [error]
    place, _ = remote()
    if passes:
        place.put(source, "b.json")
    else:
        with pytest.raises(type(error)):
            place.put(source, "b.json")
        assert flaky.writes == 1


@pytest.mark.spec("E9")
def test_what_is_there_is_not_replaced_unless_told(flaky, source):
    place, _ = remote()
    place.put(source, "b.json")
    source.write_bytes(b"new")
    with pytest.raises(FileExistsError, match=r"flaky://there/b\.json already exists, and profiling"):
        place.put(source, "b.json")
    assert flaky().cat_file("/there/b.json") == b"x" * 3000
    remote(overwrite=True)[0].put(source, "b.json")
    assert flaky().cat_file("/there/b.json") == b"new"


@pytest.mark.spec("E9")
def test_a_try_whose_answer_was_lost_is_recognised(flaky, source):
    flaky.script = ["after"]
    place, _ = remote()
    assert place.put(source, "b.json") == "flaky://there/b.json"


@pytest.mark.spec("E11")
def test_a_file_that_arrives_short_is_no_success(flaky, source, monkeypatch):
    monkeypatch.setattr(flaky, "info", lambda self, path, **_: {"size": 7, "name": path, "type": "file"})
    place, _ = remote(overwrite=True)
    with pytest.raises(OSError, match="has 7 bytes there and 3000 here"):
        place.put(source, "b.json")


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.spec("E9", "E11")
def test_a_folder_of_this_machine(tmp_path, source, monkeypatch, links):
    def refuse(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))  # as FAT does

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    monkeypatch.chdir(tmp_path)
    place = Destination("file://remote")
    place.check("rank0")
    place.put(source, "a/b.json")
    assert files_below(tmp_path / "remote") == ["a/b.json"]  # nothing left of the check, no part
    copied = (tmp_path / "remote/a/b.json").read_bytes()
    assert hashlib.sha256(copied).digest() == hashlib.sha256(source.read_bytes()).digest()
    with pytest.raises(FileExistsError):
        place.put(source, "a/b.json")
    assert files_below(tmp_path / "remote") == ["a/b.json"]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("gs://b/x", "gs:// needs a package that is not installed; run: pip install gcsfs"),
        ("foo://b/x", "no address that AORTA opens; its scheme is one of .*s3"),
        ("oci://b/x", "run: pip install ocifs"),
    ],
)
@pytest.mark.spec("E12")
def test_a_place_that_cannot_be_is_told_at_the_start(address, said):
    with pytest.raises(ConfigError, match=f"profiling.remote_root={address}: .*{said}"):
        Destination(address)


@pytest.mark.spec("E11")
def test_a_place_that_refuses_is_told_at_the_start(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"nothing can be written there: .*set profiling\.remote_root=null"):
        Destination(f"file://{tmp_path}/file/below").check("rank0")
    assert CHECK not in str(files_below(tmp_path))


@pytest.mark.parametrize(
    ("root", "template", "address"),
    [
        ("flaky://there", "{run_name}/rank{rank}.{batch}.json", "flaky://there/named/rank0.7.json"),
        ("flaky://there/", "/x/{file}", "flaky://there/x/sub/t.json"),
        (None, "flaky://else/{run_name}/{batch:03d}.json", "flaky://else/named/007.json"),
        ("flaky://there", "flaky://else/a/b.json", "flaky://else/a/b.json"),
    ],
)
@pytest.mark.spec("E11")
def test_names_there(flaky, source, root, template, address):
    to = destination(root, template, KNOWN, overwrite=False)
    assert to.put(source, to.name(KNOWN | {"batch": 7}, PurePosixPath("sub/t.json"), "none")) == address


@pytest.mark.spec("E10", "E11")
def test_no_destination_no_upload_and_gz_is_added_there_too(flaky):
    assert destination(None, "{run_name}/x.json", KNOWN, overwrite=False) is None
    assert destination("flaky://there", None, KNOWN, overwrite=False) is None
    to = destination("flaky://there", "x.json", KNOWN, overwrite=False)
    assert to.name(KNOWN, PurePosixPath("x.json.gz"), "gz") == "x.json.gz"


# --- a run's windows ----------------------------------------------------------------------------------------------


def windows(flaky, folder, count=5, **settings):
    settings = {"wait": 0, "warmup": 0, "active": 1, "repeat": 0, "folder": None} | settings
    to = destination("flaky://there", "{run_name}/{batch}.json", {"run_name": "run", "rank": 0}, overwrite=False)
    to._sleep = lambda _: None
    return loop(folder, preset("composer", **settings), count, trace_remote=to)


@pytest.mark.parametrize(("keep", "here"), [(-1, 5), (2, 2), (0, 0)])
@pytest.mark.spec("E15")
def test_local_files_go_once_they_have_arrived(flaky, tmp_path, keep, here):
    windows(flaky, tmp_path, num_traces_to_keep=keep)
    assert len(files_below(tmp_path)) == here
    assert sorted(flaky().find("/there")) == [f"/there/run/{batch}.json" for batch in range(1, 6)]


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("there", ["gone", "shorter", "not told"])
@pytest.mark.spec("E15")
def test_a_file_stays_here_unless_its_copy_is_seen_to_be_whole(flaky, tmp_path, monkeypatch, there, keep):
    """Uploads say that they worked; afterwards the copies of the odd windows are not what they were."""
    info, sure = flaky.info, Destination._confirm

    def confirmed(place, source, path):
        sure(place, source, path)
        batch = int(path.removesuffix(".json").rpartition("/")[2])
        if batch % 2 and there == "gone":
            flaky().rm_file(path)
        elif batch % 2 and there == "shorter":
            flaky().pipe_file(path, b"{}")

    def told(place, path, **words):
        found = info(place, path, **words)
        odd = path.endswith(("1.json", "3.json", "5.json"))
        return found | ({"size": None} if odd and there == "not told" else {})

    monkeypatch.setattr(Destination, "_confirm", confirmed)
    monkeypatch.setattr(flaky, "info", told)
    windows(flaky, tmp_path, num_traces_to_keep=keep)
    # The newest of those that could go stays where one is kept; those without a copy stay in any case, and count.
    assert files_below(tmp_path) == [f"rank0.{batch}.pt.trace.json" for batch in (1, 3, 5)]


@pytest.mark.spec("E15")
def test_a_place_in_this_process_is_no_copy(tmp_path):
    place, source = Destination("memory://x"), tmp_path / "trace.json"
    source.write_text("{}")
    place.put(source, "trace.json")
    assert not place.durable
    assert not place.holds(source, "trace.json")


@pytest.mark.spec("E15")
def test_what_could_not_be_uploaded_stays_here(flaky, tmp_path):
    flaky.script = [PermissionError("no"), *[None] * 9]
    profiler = windows(flaky, tmp_path, num_traces_to_keep=0)
    assert files_below(tmp_path) == ["rank0.1.pt.trace.json"]
    first, *others = profiler.saver.windows
    assert (first.files[0].on_disk, first.files[0].address) == (True, None)
    assert first.files[0].error == "PermissionError: no"
    assert [window.files[0].address for window in others] == [
        f"flaky://there/run/{batch}.json" for batch in range(2, 6)
    ]


@pytest.mark.spec("E11")
def test_a_slow_server_holds_up_neither_training_nor_the_next_files(flaky, tmp_path):
    gate = threading.Event()

    class Slow:
        def put(self, path, name):
            assert gate.wait(60)
            return f"slow://{name}"

        def holds(self, path, name):
            return True

    saver = Saver(keep=0)
    for step in range(3):
        window = TraceWindow(step, step, False, Moment(batch=step + 1))
        output = SavedFile("trace", tmp_path / f"{step}.json", Slow(), f"{step}.json")
        saver.submit(Job(window, lambda path: path.write_text("{}"), [output]))
    assert not saver.drain(0.0)
    while len(saver.windows) < 3:  # all are written while the first upload still hangs
        assert not gate.wait(0.01)
    assert files_below(tmp_path) == ["0.json", "1.json", "2.json"]
    assert not any(file.address for window in saver.windows for file in window.files)
    gate.set()
    assert saver.drain(60)
    assert files_below(tmp_path) == []
    assert [window.files[0].address for window in saver.windows] == [f"slow://{step}.json" for step in range(3)]


by_botocore = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
"""It and moto are not ours to mend."""


@pytest.fixture(scope="module")
def s3():
    """A real S3 API on this machine (moto's server) with one bucket; gives a file system of s3fs to look into it."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server")
    patch = pytest.MonkeyPatch()
    running = server.ThreadedMotoServer(port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        patch.setenv(name, value)
    fs = fsspec.filesystem("s3")
    fs.mkdir("bucket")
    yield fs
    running.stop()
    fs.clear_instance_cache()
    patch.undo()


@by_botocore
@pytest.mark.spec("E11", "E15")
def test_windows_arrive_whole_and_leave_this_disk(s3, tmp_path):
    to = destination("s3://bucket/traces", "{run_name}/rank{rank}.{batch}.json", {"run_name": "run"}, overwrite=False)
    to.check("rank0")
    settings = preset("composer", wait=0, warmup=0, active=1, repeat=2, folder=None, num_traces_to_keep=1)
    profiler = loop(tmp_path, settings, 2, trace_remote=to)
    s3.invalidate_cache()
    assert sorted(s3.find("bucket")) == ["bucket/traces/run/rank0.1.json", "bucket/traces/run/rank0.2.json"]
    assert files_below(tmp_path) == ["rank0.2.pt.trace.json"]
    assert s3.cat_file("bucket/traces/run/rank0.2.json") == (tmp_path / "rank0.2.pt.trace.json").read_bytes()
    assert [window.files[0].address for window in profiler.saver.windows] == [
        "s3://bucket/traces/run/rank0.1.json",
        "s3://bucket/traces/run/rank0.2.json",
    ]


@by_botocore
@pytest.mark.spec("E13")
def test_two_that_race_for_a_name_leave_the_first(s3, tmp_path, monkeypatch):
    source = tmp_path / "a.json"
    source.write_text("mine")
    place = Destination("s3://bucket")
    s3.pipe_file("bucket/race/a.json", b"theirs")
    monkeypatch.setattr(place._fs, "exists", lambda _path: False)  # it came after the look
    with pytest.raises(FileExistsError):
        place.put(source, "race/a.json")
    assert s3.cat_file("bucket/race/a.json") == b"theirs"
