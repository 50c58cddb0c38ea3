"""The schedule, against torch.profiler's own."""

from __future__ import annotations

from itertools import product

import pytest
from torch.profiler import ProfilerAction
from torch.profiler import schedule as torch_schedule

from aorta.capture.schedule import Action, Schedule

SAME = {
    ProfilerAction.NONE: Action.NONE,
    ProfilerAction.WARMUP: Action.WARMUP,
    ProfilerAction.RECORD: Action.ACTIVE,
    ProfilerAction.RECORD_AND_SAVE: Action.ACTIVE_AND_SAVE,
}
N, W, A, S = Action.NONE, Action.WARMUP, Action.ACTIVE, Action.ACTIVE_AND_SAVE


# torch's own schedule warns about warmup=0; here it only serves as the answer.
@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup:UserWarning")
@pytest.mark.parametrize(
    ("wait", "warmup", "active", "repeat"), list(product((0, 1, 2, 5), (0, 1, 3), (1, 2, 4), (0, 1, 2, 3)))
)
def test_it_is_torch_s_schedule(wait, warmup, active, repeat):
    answer = torch_schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
    ours = Schedule(wait, warmup, active, repeat)
    assert [ours(step) for step in range(41)] == [SAME[answer(step)] for step in range(41)]


@pytest.mark.parametrize(
    ("schedule", "actions"),
    [
        (Schedule(1, 1, 2, 1), [N, W, A, S, N, N, N, N]),
        (Schedule(1, 1, 2, 2), [N, W, A, S, N, W, A, S, N]),
        (Schedule(0, 0, 1, 0), [S, S, S, S]),
        (Schedule(0, 1, 1, 2), [W, S, W, S, N]),
    ],
)
def test_spelt_out(schedule, actions):
    assert [schedule(step) for step in range(len(actions))] == actions
