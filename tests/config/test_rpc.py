"""What a run of calls has no use for: refused where it would not be what was asked for, else said."""

from __future__ import annotations

import pytest

from aorta.config.resolve import resolve
from aorta.errors import ConfigError


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("baseline.enabled=true", "baseline=true: workload=rpc has no training steps"),
        ("fabric=emulated", "fabric=emulated: delays collectives"),
        ("profiling.remote_root=s3://b/c", r"profiling\.remote_root='s3://b/c': workload=rpc uploads nothing"),
    ],
)
def test_what_it_cannot_give_is_refused(composed, word, message):
    with pytest.raises(ConfigError, match=message):
        resolve(composed("workload=rpc", word))
    resolve(composed(word))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), None),
        (("profiling.enabled=true",), None),
        (("profiling.enabled=false", "profiling.ranks=[1]"), None),
        (("profiling.enabled=true", "profiling.ranks=[1]"), "profiling.ranks"),
        (("profiling=d9d", "profiling.enabled=true"), "profiling.naming, profiling.compression"),
        (("profiling.enabled=true", "profiling.num_traces_to_keep=1"), "profiling.num_traces_to_keep"),
        (("telemetry.devices=psutil",), "telemetry.devices"),
        (("telemetry.devices=off",), None),
        (("telemetry.loggers=[prometheus]",), "telemetry.loggers"),
    ],
)
def test_what_it_ignores_is_said(composed, words, named):
    said = f"workload=rpc: has no use for {named}: every worker profiles itself, samples no device and has no steps"
    assert resolve(composed("workload=rpc", *words)).notes == (() if named is None else (said,))
