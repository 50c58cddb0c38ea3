"""The race checker: what it finds whatever the timing, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch

from tests.simulated import device
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, needs_device]


def found() -> list[tuple[str, str]]:
    """Names of the two sides, allocation aside."""
    torch.cuda.synchronize()
    return [(race.first.name, race.second.name) for race in device.races() if "allocation" not in (race.first.name,)]


def test_reading_what_another_stream_writes_is_a_race() -> None:
    x = torch.ones(64, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    x.mul_(2)
    with torch.cuda.stream(side):
        x + 1
    assert found() == [("aten::mul", "aten::add")]


def test_an_event_orders_and_so_does_a_host_that_waits() -> None:
    x = torch.ones(64, device="cuda")
    side = torch.cuda.Stream()
    x.mul_(2)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    side.synchronize()
    x.mul_(2)
    assert x[0].item() == 6
    device.no_races()


def test_an_event_recorded_too_early_orders_nothing() -> None:
    x = torch.ones(64, device="cuda")
    torch.cuda.synchronize()
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    x.mul_(2)
    side.wait_event(event)
    with torch.cuda.stream(side):
        x + 1
    assert found() == [("aten::mul", "aten::add")]


def test_a_query_that_said_yes_orders_no_launch_unless_asked() -> None:
    x = torch.ones(64, device="cuda")
    torch.cuda.synchronize()
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    for orders in (False, True):
        device.polling_orders(orders)
        device.reset()
        x.mul_(2)
        event.record()
        while not event.query():
            pass
        with torch.cuda.stream(side):
            x + 1
        assert found() == ([] if orders else [("aten::mul", "aten::add")])


def test_columns_of_a_matrix_are_apart() -> None:
    x = torch.ones(8, 64, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    x[:, :32].mul_(2)
    with torch.cuda.stream(side):
        x[:, 32:].mul_(2)
        x[:, 31:33].add(1)
    assert found() == [("aten::mul", "aten::add")]


def test_memory_given_back_while_another_stream_reads_it_is_a_race() -> None:
    x = torch.ones(64, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x + 1
    del x
    torch.empty(5000, device="cuda")  # of another size: the allocator might have cut it out of the same bytes
    assert found() == [("aten::add", "memory given out again")]


@pytest.mark.parametrize("how", ["record_stream", "wait", "query"])
def test_memory_given_back_in_order_is_not(how: str) -> None:
    x = torch.ones(64, device="cuda")
    torch.cuda.synchronize()
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        x + 1
        event.record()
    if how == "record_stream":
        x.record_stream(side)
    elif how == "wait":
        torch.cuda.current_stream().wait_event(event)
    else:
        while not event.query():
            pass
    del x
    torch.empty(64, device="cuda")
    assert found() == []


def test_who_does_not_wait_for_reused_memory_reads_poison() -> None:
    side = torch.cuda.Stream()
    x = torch.ones(64, device="cuda")
    torch.cuda.synchronize()
    device.real_delays(operator_ns=3_000_000_000)  # far longer than a busy machine needs for what follows
    del x
    y = torch.ones(64, device="cuda")  # the same bytes
    device.real_delays(operator_ns=0)
    with torch.cuda.stream(side):
        early = y.clone()
    torch.cuda.synchronize()
    assert bool(early.isnan().any())
    assert device.races()


def test_live_and_peak_bytes_count_what_the_caching_allocator_counts() -> None:
    before = torch.cuda.memory_allocated()
    device.reset()
    x = torch.empty(100, device="cuda")  # 400 bytes: 512
    y = torch.empty(256, device="cuda")  # 1,024
    assert torch.cuda.memory_allocated() - before == 1536
    del x
    z = torch.empty(1, device="cuda")
    assert torch.cuda.memory_allocated() - before == 1536
    assert torch.cuda.max_memory_allocated() - before == 1536
    del y, z
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == before
