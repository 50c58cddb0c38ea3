"""Uploads to a real S3 API on this machine: moto's server, s3fs as the client."""

from __future__ import annotations

import pytest

from aorta.profiling.upload import Destination, destination
from tests.profiling.windows import files_below, loop, preset

pytest.importorskip("s3fs")
server = pytest.importorskip("moto.server")
# botocore and moto are not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def s3():
    """A server with one bucket; gives a file system to look into it."""
    import fsspec

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
