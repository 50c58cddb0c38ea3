"""Which tracer is there, and that torch.profiler does not run beside it (D14, D28)."""

from __future__ import annotations

import pytest

from aorta.distributed.environment_checks import refuse_two_tracers, tracer_present, untraced
from aorta.errors import ConfigError
from tests.runs import attempt

TOOL = "/opt/rocm/lib/rocprofiler-sdk/librocprofiler-sdk-tool.so"
ROCPROF = {"LD_PRELOAD": f"{TOOL}:/opt/rocm/lib/librocprofiler-sdk.so", "ROCP_TOOL_LIBRARIES": TOOL}
NSYS = {"NSYS_PROFILING_SESSION_ID": "4711", "CUDA_INJECTION64_PATH": "/opt/nsys/libToolsInjection64.so"}


@pytest.mark.parametrize(
    ("environment", "tracer"),
    [
        ({}, None),
        ({"LD_PRELOAD": "libjemalloc.so"}, None),
        ({"NSYS_PROFILING_SESSION_ID": ""}, None),
        (ROCPROF, "rocprofv3"),
        ({"LD_PRELOAD": TOOL}, "rocprofv3"),
        (NSYS, "nsys"),
    ],
)
@pytest.mark.spec("D28")
def test_a_tracer_is_known_by_its_environment(environment, tracer):
    assert tracer_present(environment) == tracer


@pytest.mark.parametrize(("environment", "name"), [(ROCPROF, "rocprofv3"), (NSYS, "nsys")])
@pytest.mark.spec("D28")
def test_torch_profiler_beside_a_tracer_is_refused(environment, name):
    refuse_two_tracers(False, environment)
    refuse_two_tracers(True, {})
    with pytest.raises(ConfigError, match=f"traced by {name}.*profiling.enabled=false"):
        refuse_two_tracers(True, environment)


@pytest.mark.spec("D28")
def test_a_profiler_switched_on_in_a_file_is_refused_too(tmp_path, monkeypatch):
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "4711")
    (tmp_path / "mine.yaml").write_text("defaults: [default, _self_]\nprofiling:\n  enabled: true\n")
    done = attempt(tmp_path / "run", "--config", str(tmp_path / "mine.yaml"), ranks=1)
    assert (done.returncode, "traced by nsys" in done.stderr) == (ConfigError.exit_code, True)
    assert not (tmp_path / "run").exists()


def test_helper_programs_are_not_traced_along():
    assert untraced({"PATH": "/bin", "LD_PRELOAD": "libjemalloc.so"}) == {
        "PATH": "/bin",
        "LD_PRELOAD": "libjemalloc.so",
    }
    assert untraced(ROCPROF | {"PATH": "/bin"}) == {"PATH": "/bin"}
    assert untraced(NSYS | {"PATH": "/bin"}) == {"PATH": "/bin", "NSYS_PROFILING_SESSION_ID": "4711"}
