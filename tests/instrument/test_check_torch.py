"""A private name of torch that is gone is named before anything is measured, with what is lost and what still works."""

from __future__ import annotations

import runpy
import sys

import pytest
import torch

from aorta.errors import InstrumentError
from aorta.instrument.dispatcher import PrivateName, check_torch, private_names


def test_this_torch_has_them_all() -> None:
    check_torch()


@pytest.mark.parametrize("gone", private_names(), ids=lambda each: each.name)
def test_a_name_that_is_gone_is_told_with_what_is_lost(gone: PrivateName, monkeypatch: pytest.MonkeyPatch) -> None:
    remove(gone, monkeypatch)
    words = f"^torch {torch.__version__} does not offer .*{gone.name}.*, without which .*{gone.lost}"
    with pytest.raises(InstrumentError, match=words.replace("+", r"\+")) as error:
        check_torch()
    assert "What still works with instrument.mode=off: training" in str(error.value)


def remove(gone: PrivateName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a name from this torch, wherever the attribute stands."""
    if gone.owner is torch.ops.c10d:  # makes its attributes when asked for them
        monkeypatch.delattr(gone.owner, gone.attribute)
        monkeypatch.setattr(type(gone.owner), "__getattr__", object.__getattribute__)
    elif gone.attribute == "queue_callback":  # of a type that cannot be changed
        monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", object())
    else:
        monkeypatch.delattr(gone.owner if gone.attribute in vars(gone.owner) else type(gone.owner), gone.attribute)


def test_remote_calls_say_what_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.autograd, "_profiler_enabled")
    words = "cannot import name '_profiler_enabled'.*workload=rpc does not work with it. Every other workload does"
    # Another test of this process may have imported it, and runpy warns of that.
    monkeypatch.delitem(sys.modules, "aorta.rpc.tracer", raising=False)
    with pytest.raises(InstrumentError, match=words):
        runpy.run_module("aorta.rpc.tracer")
