"""Uploads: which errors are tried again, what is never replaced, and that nothing is lost whatever the server does."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import PurePosixPath
from unittest.mock import Mock

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from aorta.errors import ConfigError
from aorta.installation import FILE_SYSTEMS
from aorta.profiling.upload import ATTEMPTS, Destination, destination, may_pass
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


def remote(**words):
    return Destination("flaky://there", sleep=Mock(), **words)


@pytest.mark.spec("E11")
def test_a_server_that_fails_twice_gets_it_the_third_time_and_no_later(flaky, source):
    flaky.script = [ConnectionRefusedError("no"), OSError(errno.EBUSY, "slow down")]
    place = remote()
    assert place.put(source, "/a/b.json") == "flaky://there/a/b.json"  # a leading / is dropped
    assert flaky().cat_file("/there/a/b.json") == source.read_bytes()
    assert (flaky.writes, place._sleep.call_count) == (3, 2)
    flaky.script, flaky.writes = [ConnectionRefusedError("no")] * 9, 0
    with pytest.raises(ConnectionRefusedError):
        place.put(source, "b.json")
    assert flaky.writes == ATTEMPTS == 3


def error_of(name: str, **attributes: int) -> Exception:
    """As clients define them: botocore's of what never reached a server, or one with a status."""
    return type(name, (Exception,), attributes)()


@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.spec("E11")
def test_only_what_may_pass_is_tried_again(flaky, source, passes):
    place = remote(overwrite=True)
    passing = [ConnectionResetError(), TimeoutError(), error_of("HTTPClientError"), OSError("no number")]
    passing += [OSError(errno.EIO, "server"), OSError(errno.EBUSY, "slow down")]
    passing += [error_of("Http", status=status) for status in (503, 429)]
    lasting = [PermissionError(errno.EACCES, "no"), FileNotFoundError(), FileExistsError()]
    lasting += [error_of("Http", status=status) for status in (403, 404)]
    lasting += [OSError(errno.EINVAL, "signature"), OSError(errno.ENOSPC, "full"), ValueError()]
    for error in passing if passes else lasting:
        assert may_pass(error) is passes
        flaky.script, flaky.writes = [error], 0
        with nullcontext() if passes else pytest.raises(type(error)):
            place.put(source, "b.json")
        assert flaky.writes == 1 + passes


@pytest.mark.spec("E9", "E11")
def test_a_try_whose_answer_was_lost_is_recognised_and_a_file_that_arrives_short_is_no_success(
    flaky, source, monkeypatch
):
    flaky.script = ["after"]
    assert remote().put(source, "b.json") == "flaky://there/b.json"
    monkeypatch.setattr(flaky, "info", lambda self, path, **_: {"size": 7, "name": path, "type": "file"})
    with pytest.raises(OSError, match="has 7 bytes there and 3000 here"):
        remote(overwrite=True).put(source, "b.json")


@pytest.mark.spec("E15")
def test_a_copy_is_held_where_it_is_seen_to_be_whole_and_outlives_this_process(flaky, source, monkeypatch):
    place, fs = remote(), flaky()
    place.put(source, "b.json")
    assert place.holds(source, "b.json")
    fs.pipe_file("/there/b.json", b"{}")
    assert not place.holds(source, "b.json"), "shorter"
    fs.rm_file("/there/b.json")
    assert not place.holds(source, "b.json"), "gone"
    monkeypatch.setattr(flaky, "info", lambda self, path, **_: {"size": None, "name": path, "type": "file"})
    assert remote(overwrite=True).put(source, "c.json")
    assert not place.holds(source, "c.json"), "not told"
    memory = Destination("memory://x")
    memory.put(source, "b.json")
    assert not memory.durable
    assert not memory.holds(source, "b.json")


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.spec("E9", "E11")
def test_in_a_folder_of_this_machine_what_is_there_is_not_replaced_unless_told(tmp_path, source, monkeypatch, links):
    if not links:  # as on FAT
        monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(errno.EPERM, os.strerror(errno.EPERM))))
    monkeypatch.chdir(tmp_path)
    place = Destination("file://remote")
    place.check("rank0")
    place.put(source, "a/b.json")
    assert files_below(tmp_path / "remote") == ["a/b.json"]  # nothing left of the check, no part
    was = source.read_bytes()
    source.write_bytes(b"new")
    with pytest.raises(FileExistsError, match=r"a/b\.json already exists, and profiling"):
        place.put(source, "a/b.json")
    assert files_below(tmp_path / "remote") == ["a/b.json"]
    assert (tmp_path / "remote/a/b.json").read_bytes() == was
    Destination("file://remote", overwrite=True).put(source, "a/b.json")
    assert (tmp_path / "remote/a/b.json").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("gs://b/x", "gs:// needs a package that is not installed; run: pip install gcsfs"),
        ("foo://b/x", "no address that AORTA opens; its scheme is one of .*s3"),
        ("file://{here}/file/below", r"nothing can be written there: .*set profiling\.remote_root=null"),
    ],
)
@pytest.mark.spec("E11", "E12")
def test_a_place_that_cannot_be_or_refuses_is_told_at_the_start(address, said, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=f"profiling.remote_root=.*: .*{said}"):
        Destination(address.format(here=tmp_path)).check("rank0")
    assert files_below(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("root", "template", "address"),
    [
        ("flaky://there", "{run_name}/rank{rank}.{batch}.json", "flaky://there/named/rank0.7.json"),
        ("flaky://there/", "/x/{file}", "flaky://there/x/sub/t.json"),
        (None, "flaky://else/{run_name}/{batch:03d}.json", "flaky://else/named/007.json"),
        ("flaky://there", "flaky://else/a/b.json", "flaky://else/a/b.json"),
    ],
)
@pytest.mark.spec("E10", "E11")
def test_names_there(flaky, source, root, template, address):
    to = destination(root, template, KNOWN, overwrite=False)
    assert to.put(source, to.name(KNOWN | {"batch": 7}, PurePosixPath("sub/t.json"), "none")) == address
    assert to.name(KNOWN, PurePosixPath("t.json.gz"), "gz").endswith(".json.gz")


@pytest.mark.spec("E11")
def test_no_destination_no_upload():
    for root, template in ((None, "{run_name}/x.json"), ("flaky://there", None)):
        assert destination(root, template, KNOWN, overwrite=False) is None


by_botocore = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
"""It and moto are not ours to mend."""


@pytest.fixture
def s3(monkeypatch):
    """A real S3 API on this machine (moto's server) with one bucket; gives a file system of s3fs to look into it."""
    pytest.importorskip("s3fs")
    running = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    running.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*running.get_host_and_port()))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    fs = fsspec.filesystem("s3")
    fs.mkdir("bucket")
    yield fs
    running.stop()
    fs.clear_instance_cache()


@by_botocore
@pytest.mark.spec("E11", "E13", "E15")
def test_windows_arrive_whole_and_leave_this_disk_and_a_race_for_a_name_leaves_the_first(s3, tmp_path, monkeypatch):
    to = destination("s3://bucket/traces", "{run_name}/rank{rank}.{batch}.json", {"run_name": "run"}, overwrite=False)
    to.check("rank0")
    settings = preset("composer", wait=0, warmup=0, active=1, repeat=2, folder=None, num_traces_to_keep=1)
    profiler = loop(tmp_path, settings, 2, trace_remote=to)
    s3.invalidate_cache()
    names = ["bucket/traces/run/rank0.1.json", "bucket/traces/run/rank0.2.json"]
    assert sorted(s3.find("bucket")) == names
    assert files_below(tmp_path) == ["rank0.2.pt.trace.json"]
    source = tmp_path / "rank0.2.pt.trace.json"
    assert s3.cat_file(names[1]) == source.read_bytes()
    assert [window.files[0].address for window in profiler.saver.windows] == [f"s3://{name}" for name in names]
    s3.pipe_file("bucket/traces/a.json", b"theirs")
    monkeypatch.setattr(to._fs, "exists", lambda _path: False)  # it came after the look
    with pytest.raises(FileExistsError):
        to.put(source, "a.json")
    assert s3.cat_file("bucket/traces/a.json") == b"theirs"
