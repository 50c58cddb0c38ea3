"""The account of a step: its parts add up at every level and between two sides, and a cause never contradicts them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import scipy
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from aorta.analysis.account import (
    BUBBLE,
    COMPUTATION,
    EXPOSED,
    HIDES,
    IDLE,
    MARGIN,
    OUTSIDE,
    TRANSFER,
    WAITING,
    StepAccount,
    Words,
    as_document,
)
from aorta.analysis.causes import PartChange, causes, change_of, compare_accounts
from aorta.analysis.compare.launch_comparison import add_account
from aorta.analysis.compare.launch_set import Launch, LaunchSet, Subject, launch_order
from aorta.analysis.compare.verdict import NOT_COMPARABLE, Rules
from aorta.documents.comparison import AccountChange, AccountComparison, FactDifference
from aorta.documents.explanations import Account, AccountPart
from aorta.report.account_tables import account_rows
from aorta.report.page.elements import step_bars, waterfall

FORWARD, BACKWARD = (COMPUTATION, "forward", "alone"), (COMPUTATION, "backward", HIDES)
WAIT, SEND = (EXPOSED, "allreduce", WAITING), (EXPOSED, "allreduce", TRANSFER)
DATA, OPTIMIZER, GAP = (OUTSIDE, "data"), (OUTSIDE, "optimizer"), (IDLE, "data .. forward")
LEAVES = (FORWARD, BACKWARD, (COMPUTATION, "backward", "alone"), WAIT, SEND, DATA, OPTIMIZER, GAP, (IDLE, BUBBLE))
STEPS = 10


def account(
    ms: dict[Words, float], ranks: int = 2, late: Sequence[int] = (), late_ms: dict[Words, float] | None = None
) -> StepAccount:
    """A launch whose ranks have the same step, but for what the late ones have in addition."""
    whole = StepAccount()
    for rank in range(ranks):
        of_rank = Counter({words: round(value * STEPS * 1e6) for words, value in ms.items()})
        if rank in late:
            of_rank.update({words: round(value * STEPS * 1e6) for words, value in (late_ms or {}).items()})
        own = StepAccount(STEPS, of_rank.total(), of_rank)
        whole.ranks[rank] = own
        whole.rank_steps, whole.window_ns = whole.rank_steps + STEPS, whole.window_ns + own.window_ns
        whole.leaves += of_rank
    return whole


def launches(ms: dict[Words, float], count: int = 4, seed: int = 0, **more: object) -> list[StepAccount]:
    """Launches whose parts vary by 1 % or 0.1 ms."""
    draw = np.random.default_rng(seed)
    varied = [
        {words: max(value + draw.normal(0, max(0.01 * value, 0.1)), 0.0) for words, value in ms.items()}
        for _ in range(count)
    ]
    return [account(each, **more) for each in varied]


def longer(side: list[StepAccount], words: Words, by_ms: Sequence[float]) -> None:
    """Launches in which every rank takes so much longer for a part."""
    for each, more_ms in zip(side, by_ms, strict=True):
        for own in (each, each, *each.ranks.values()):
            own.leaves[words] += round(more_ms * STEPS * 1e6)
            own.window_ns += round(more_ms * STEPS * 1e6)


def named(found: AccountComparison) -> list[str]:
    """The causes, without their numbers."""
    return [said.split(" +")[0] for said in found.causes]


STEP = {FORWARD: 20.0, BACKWARD: 40.0, WAIT: 2.0, SEND: 10.0, DATA: 1.0, OPTIMIZER: 9.0, GAP: 3.0}


def parts(found: Sequence[AccountPart]) -> Iterator[tuple[float, Sequence[AccountPart]]]:
    for part in found:
        if part.parts:
            yield part.ms, part.parts
            yield from parts(part.parts)


sides = st.lists(
    st.lists(st.floats(0, 100), min_size=len(LEAVES), max_size=len(LEAVES)), min_size=1, max_size=5
).filter(lambda rows: all(sum(row) > 1 for row in rows))


@settings(max_examples=300)
@given(sides, sides)
def test_parts_add_up_and_no_cause_contradicts_its_table(before, after):
    reference, candidate = ([account(dict(zip(LEAVES, row, strict=True))) for row in side] for side in (before, after))
    document = as_document(reference)
    assert sum(part.ms for part in document.parts) == pytest.approx(document.step_ms)
    assert sum(part.share for part in document.parts) == pytest.approx(1.0)
    for whole, below in parts(document.parts):
        assert sum(part.ms for part in below) == pytest.approx(whole, abs=1e-9)
    rows = account_rows(document)
    assert sum(row["ms"] for row in rows[1:]) == pytest.approx(rows[0]["ms"])
    found = compare_accounts(reference, candidate)
    assert sum(part.change_ms for part in found.parts) == pytest.approx(found.step.change_ms, abs=1e-9)
    for part in found.parts:
        assert sum(below.change_ms for below in part.parts) == pytest.approx(part.change_ms, abs=1e-9)
        for caused in named_in(part):
            assert excludes_zero(caused)
            more = abs(caused.change_ms) > abs(found.step.change_ms)
            assert caused.change_ms * found.step.change_ms > 0 or (more and not found.decided)
            assert abs(caused.change_ms) >= MARGIN * found.step.reference_ms
    assert bool(found.causes) == any(part.cause for part in found.parts)
    drawn_as_it_is(document, found)


def named_in(part: AccountChange) -> list[AccountChange]:
    """The parts named as causes, as far as the document goes: exposed communication is named a level deeper."""
    if not part.cause or part.name == EXPOSED:
        return []
    return [below for below in part.parts if below.cause] or [part]


def drawn_as_it_is(document: Account, found: AccountComparison) -> None:
    """What the page draws adds up to the step and to its change, within 0.1 %."""
    entry = mock.Mock(account=document)
    (bar,) = step_bars({"run": entry})
    assert sum(segment["width"] for segment in bar["segments"]) == pytest.approx(100, rel=1e-3)
    before, *rows, after = waterfall(found)
    at = before.width
    for row, part in zip(rows, found.parts, strict=True):
        begin, end = (row.left, row.left + row.width) if part.change_ms >= 0 else (row.left + row.width, row.left)
        assert begin == pytest.approx(at, abs=0.1)
        at = end
    assert at == pytest.approx(after.width, abs=0.1)


def excludes_zero(part: AccountChange) -> bool:
    return part.low_ms is not None and part.high_ms is not None and (part.low_ms > 0 or part.high_ms < 0)


def said_of(found: AccountComparison) -> str:
    return str(found.sentence).lower()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({GAP: 20.0}, "Idle between data and forward (outside timed blocks) +"),
        ({DATA: 15.0}, "Waiting for the DataLoader +"),
        ({SEND: 12.0}, "Exposed allreduce, transfer +"),
        ({OPTIMIZER: -6.0}, "Optimizer -"),
        ({FORWARD: 10.0, BACKWARD: 20.0}, "Computation +"),  # in proportion
        ({FORWARD: 20.0, BACKWARD: -12.0}, "Computation +"),  # most of what one phase gained the other lost
        ({SEND: 12.0, GAP: 11.0}, "; "),
    ],
)
def test_a_planted_cause_is_named(changes, said):
    changed = {words: STEP[words] + changes.get(words, 0.0) for words in STEP}
    found = compare_accounts(launches(STEP), launches(changed, seed=1))
    assert found.decided
    assert said in str(found.sentence)
    named = [word for word in ("idle", "dataloader", "allreduce", "optimizer", "computation") if word in said_of(found)]
    assert len(named) == len({words[0] for words in changes})


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({OPTIMIZER: 20.0, DATA: 3.0, SEND: 18.0}, 1),  # data grew a little with it
        ({OPTIMIZER: 20.0, DATA: 17.0, SEND: 18.0}, 2),  # almost as much
        # Less than half of the change, and others less than half of that; and both together most of it.
        ({OPTIMIZER: 20.0, DATA: 9.5, GAP: 9.4, FORWARD: 9.3}, 1),
        ({OPTIMIZER: 20.0, DATA: 14.0, GAP: 10.5}, 2),
    ],
)
def test_a_part_that_grew_a_little_is_no_cause_beside_the_largest(changes, count):
    changed = {words: STEP[words] + changes.get(words, 0.0) for words in STEP}
    candidate = launches(changed, seed=1)
    longer(
        candidate, SEND, [sign * 0.9 * changed[SEND] for sign in (1, -1, 1, -1)]
    )  # it is not certain to have changed
    assert named(compare_accounts(launches(STEP), candidate)) == ["optimizer", "waiting for the DataLoader"][:count]


def test_parts_that_make_less_than_a_third_of_the_change_are_no_causes():
    certain = PartChange((IDLE,), 0.0, 20.0)
    assert causes([certain], 59.0, 100.0, lambda part: 0.0) == [certain]
    assert causes([certain], 61.0, 100.0, lambda part: 0.0) == []
    # For a rank that is late by 80 ms, three others wait: the step changes by 80 ms, the mean of the part by 20 ms.
    assert causes([certain], 61.0, 100.0, lambda part: 4 * part.ms) == [certain]


def test_idle_time_changed_at_a_place_or_where_it_is_spread_over_many_as_a_whole():
    place, other = (IDLE, "data .. forward"), (IDLE, "backward .. optimizer")
    spread: dict[Words, float] = {(IDLE, f"layer {at} .. layer {at + 1}"): 0.8 for at in range(8)}
    step = {words: ms for words, ms in STEP.items() if words != GAP}
    found = compare_accounts(launches({**step, **spread}), launches({**step, **dict.fromkeys(spread, 1.6)}, seed=1))
    assert named(found) == ["idle"]
    # Where another place varies from launch to launch, idle time as a whole is not certain to have changed.
    before, after = launches(STEP), launches({**STEP, place: 22.0}, seed=1)
    longer([*before, *after], other, (30, 0, 40, 5, 10, 40, 0, 30))
    found = compare_accounts(before, after)
    assert named(found) == ["idle between data and forward (outside timed blocks)"]
    (idle,) = (part for part in found.parts if part.cause)
    assert not excludes_zero(idle)
    assert [below.name for below in idle.parts if below.cause] == ["data .. forward"]


def test_exposed_communication_is_a_cause_as_a_whole_where_it_moves_between_kinds():
    gather, scatter = ((EXPOSED, kind, TRANSFER) for kind in ("allgather", "reducescatter"))
    reference = launches(STEP)
    candidate = launches({**STEP, SEND: 0.0, WAIT: 0.0, OPTIMIZER: 16.0}, seed=1)
    longer(candidate, gather, (5, 35, 8, 33))  # none of its kinds is certain to have changed, and their sum is
    longer(candidate, scatter, (35, 5, 32, 7))
    found = compare_accounts(reference, candidate)
    assert named(found) == ["exposed communication"]
    assert [part.name for part in found.parts if part.cause] == [EXPOSED]
    # A kind that takes another's place is a cause by as much as the whole changed, and none where it did not.
    other = {**STEP, SEND: 0.0, WAIT: 0.0}
    for scatter_ms, said in ((28.0, "Exposed communication +16"), (12.0, "None")):
        found = compare_accounts(launches(STEP), launches({**other, scatter: scatter_ms}, seed=1))
        assert str(found.sentence).startswith(said)
    # What is suffered is no cause, whether its kind is certain or not.
    waits = launches({**STEP, SEND: 0.0, WAIT: 0.0, OPTIMIZER: 16.0}, seed=1)
    longer(waits, (EXPOSED, "allgather", WAITING), (5, 35, 8, 33))
    longer(waits, (EXPOSED, "reducescatter", WAITING), (35, 5, 32, 7))
    assert EXPOSED not in " ".join(named(compare_accounts(reference, waits)))


def test_a_part_is_certain_where_the_step_is_not_and_may_have_the_other_sign():
    reference, candidate = launches({**STEP, SEND: 41.0}), launches({**STEP, OPTIMIZER: 29.0, SEND: 41.0}, seed=1)
    longer(candidate, SEND, (-40, 0, -40, -30))
    found = compare_accounts(reference, candidate)
    assert (found.decided, found.step.change_ms < 0) == (False, True)
    assert str(found.sentence).startswith("Optimizer +")
    assert str(found.sentence).endswith(", while the step itself is not decided.")
    slower, same, faster = (compare_accounts(reference, candidate, headline_ms=ms) for ms in (20.0, 0.0, -20.0))
    assert (slower.causes, str(slower.sentence)[-4:], faster.causes) == (found.causes, " ms.", [])
    assert str(same.sentence).endswith(", while the step itself is unchanged.")  # as the headline says


def test_the_part_below_that_is_said_has_its_own_change():
    found = compare_accounts(launches(STEP), launches({**STEP, FORWARD: 40.0, BACKWARD: 56.0}, seed=1))
    (said,) = found.causes
    assert said.startswith("forward computation +20")
    (computation,) = (part for part in found.parts if part.cause)
    assert computation.change_ms == pytest.approx(36, abs=1)


@pytest.mark.parametrize(
    ("idle", "note"),
    [
        ({GAP: 3.0}, "most of it between data and forward"),
        ({GAP: 30.0}, "30 ms unexplained, most of it between data and forward"),
        ({(IDLE, 'range "tokenize"'): 20.0, (IDLE, BUBBLE): 9.0}, '20 ms in range "tokenize"; 9 ms in bubble'),
        (
            {(IDLE, 'range "tokenize"'): 20.0, GAP: 6.0, (IDLE, "a .. b"): 6.0, (IDLE, "b .. c"): 6.0},
            '20 ms in range "tokenize"; 18 ms unexplained, 6 ms of it between data and forward',
        ),
    ],
)
def test_idle_time_of_a_tenth_of_the_step_is_explained_or_called_unexplained(idle, note):
    step = {words: ms for words, ms in STEP.items() if words != GAP}
    rows = account_rows(as_document([account(step | idle)]))
    assert [row["note"] for row in rows if row["part"] == "idle"] == [note]


def test_waiting_leads_to_the_rank_that_was_waited_for():
    slow = launches({**STEP, WAIT: 22.0}, seed=1, late=(1,), late_ms={GAP: 12.0, DATA: 10.0})
    for each in slow:
        each.waited_for[1] = each.leaves[WAIT]
        each.ranks[1].leaves[WAIT] = 0  # the late rank waits for nobody
    for sides, sign in (((launches(STEP), slow), "+"), ((slow, launches(STEP)), "-")):
        said = said_of(compare_accounts(*sides))
        assert said.startswith(f"waiting for rank 1 {sign}20")
        assert f"its idle between data and forward (outside timed blocks) {sign}12" in said


@pytest.mark.parametrize(
    ("ranks", "late", "waits_less", "said"),
    [
        (8, (1,), 0.0, r"idle .* \(rank 1: \+15"),
        (8, (1, 4), 0.0, r"idle .* \(up to \+15.* on a rank\)"),
        (32, (1,), 0.0, "idle"),
        (8, (1,), 20.0, "exposed"),
    ],
)
def test_what_a_rank_does_longer_is_the_cause_of_what_others_transfer_exposed(ranks, late, waits_less, said):
    """Collectives queue behind the one for which others wait: exposed, and no transfer is slower. A rank that waits
    less by as much as it does longer holds nobody up.
    """
    slow = launches({**STEP, SEND: 20.0}, seed=1, ranks=ranks, late=late, late_ms={GAP: 15.0, SEND: -waits_less})
    (cause,) = compare_accounts(launches(STEP, ranks=ranks), slow).causes
    assert re.match(said, cause)


def test_a_rank_that_grew_and_the_waiting_for_it_are_said_once():
    slow = launches({**STEP, WAIT: 22.0}, seed=1, ranks=3, late=(1,), late_ms={GAP: 22.0})
    for each in slow:
        each.waited_for[1] = each.leaves[WAIT]
    found = compare_accounts(launches(STEP, ranks=3), slow)
    assert len(found.causes) == 1
    assert {part.name for part in found.parts if part.cause} == {EXPOSED, IDLE}


@pytest.mark.parametrize(("slower", "computes", "said"), [(1.5, 1.0, 0), (1.0, 2.4, 1)])
def test_what_slows_all_parts_alike_is_the_cause_of_none_and_hides_none(slower, computes, said):
    """Launches differ as a whole, by a fifth and more; the candidate's are slower, or compute longer alone."""
    draw = np.random.default_rng(0)

    def side(slower: float, computes: float) -> list[StepAccount]:
        pace = slower * np.exp(draw.normal(0, 0.2, 4))
        own = {words: ms * (computes if words[0] == COMPUTATION else 1.0) for words, ms in STEP.items()}
        return [account({words: ms * by * draw.normal(1, 0.02) for words, ms in own.items()}) for by in pace]

    found = [compare_accounts(side(1.0, 1.0), side(slower, computes)) for _ in range(50)]
    named = [each for each in found if each.causes]
    assert all("computation +" in each.causes[0] for each in named if said)
    assert len(named) >= 40 if said else len(named) <= 10
    unnamed = [each for each in found if each.decided and not each.causes]
    assert all(str(each.sentence).startswith("None is named: no part") for each in unnamed)


@pytest.mark.parametrize(
    ("changed", "count", "more", "decided", "sentence"),
    [
        pytest.param({GAP: 40.0}, 1, {}, False, None, id="one launch a side"),
        pytest.param({WAIT: 22.0}, 4, {}, True, "None is named: no part", id="waiting that no rank explains"),
        pytest.param({SEND: 30.0}, 4, {"why_none": "None is named."}, True, "None is named.", id="unlike work"),
    ],
)
def test_parts_are_shown_and_no_cause_is_named(changed, count, more, decided, sentence):
    found = compare_accounts(launches(STEP, count), launches({**STEP, **changed}, count, seed=1), **more)
    assert (bool(found.decided), found.causes) == (decided, [])
    assert (found.sentence or "").startswith(sentence or "")
    assert (found.sentence is None) == (found.step.low_ms is None) == (sentence is None)
    assert not any(part.cause for part in found.parts)
    assert sum(part.change_ms for part in found.parts) == pytest.approx(found.step.change_ms)


def test_settings_come_before_the_cause_and_labels_are_none():
    differences = [
        FactDifference("config.parallel.overlap", True, False),
        FactDifference("config.label", "a", "b"),
        FactDifference("header.host", "x", "y"),
    ]
    found = compare_accounts(launches(STEP), launches({**STEP, SEND: 30.0}), differences)
    assert str(found.sentence).startswith("Configuration: parallel.overlap true -> false. Exposed allreduce")


@pytest.mark.parametrize(
    ("sequence", "verdict", "said"),
    [
        ("RCRCRC", "inconclusive", "None is named: it takes 4 launches per side."),
        ("RRRRCCCC", "inconclusive", "None is named: the launches of the two sides did not take turns (RRRRCCCC)"),
        ("RCCRRCCR", "inconclusive", "Exposed allreduce, transfer +"),
        ("RRRRCCCC", NOT_COMPARABLE, None),  # a verdict that is withheld has no account beside it
    ],
)
def test_a_cause_needs_launches_in_turns_also_where_these_are_too_few_for_a_verdict(sequence, verdict, said):
    def side(letter: str, ms: dict[Words, float]) -> Subject:
        at = [1 + place for place, each in enumerate(sequence) if each == letter]
        own = zip(at, launches(ms, len(at), ord(letter)), strict=True)
        made = [Launch(Path(str(t)), f"{t}", {}, {}, (), (t, t), account=each) for t, each in own]
        return Subject(mock.Mock(), LaunchSet(Path(letter), tuple(made), []))

    sides = side("R", STEP), side("C", {**STEP, SEND: 30.0})
    order = launch_order(*(each.as_set() for each in sides))
    given = {"unlike": [], "verdict": verdict, "launch_order": order, "manifest_differences": [], "metrics": {}}
    found = mock.Mock(**given, account=None)
    add_account(found, sides, Rules(allow_unlike=("work",)))
    if said is None:
        assert found.account is None
    else:
        assert str(found.account.sentence).startswith(said)
        assert found.account.step.low_ms > 0


values = st.lists(st.integers(-10_000, 10_000).map(lambda value: value / 100), min_size=2, max_size=8).filter(
    lambda row: len(set(row)) > 1
)


@given(values, values)
@example([0.01, 0.01, 0.01, 0.02], [0.01, 0.01, 0.01, 0.03])  # on the scale of logarithms
def test_the_interval_is_that_of_turns_where_these_matter_else_welch_s(before, after):
    found = change_of((), before, after)
    (low, high), change_ms = found.interval_ms, np.mean(after) - np.mean(before)
    if found.in_proportion:
        assert min(*before, *after) > 0
        reference_ms, before, after = np.mean(before), np.log(before), np.log(after)
    alike = np.corrcoef(before, after)[0, 1] if len(before) == len(after) else -1.0
    assume(abs(alike) > 1e-6 and (alike < 0 or np.ptp(np.subtract(after, before)) > 1e-6))
    t = scipy.stats
    expected = t.ttest_rel(after, before) if alike > 0 else t.ttest_ind(after, before, equal_var=False)
    interval = expected.confidence_interval(0.95)
    if found.in_proportion:
        interval = [reference_ms * np.expm1(end) for end in (interval.low, interval.high)]
        interval = min(interval[0], change_ms), max(interval[1], change_ms)
    assert (low, high) == pytest.approx(tuple(interval))
    p = expected.pvalue if expected.statistic * change_ms > 0 else 1.0
    assert found.p == pytest.approx(p, abs=1e-12)
    assert found.certain() == (p < 0.05)


@pytest.mark.parametrize(("of_launch", "of_part"), [(0.3, 0.15), (0.02, 0.03)])
def test_of_fifty_pairs_of_equal_launches_one_has_a_cause(of_launch, of_part):
    """Launches that differ as a whole, and parts that do; that launches take turns helps nobody here."""
    draw, pairs = np.random.default_rng(0), 300

    def side() -> list[StepAccount]:
        factors = np.exp(draw.normal(0, of_launch, (4, 1)) + draw.normal(0, of_part, (4, len(STEP))))
        return [account({words: ms * by for (words, ms), by in zip(STEP.items(), row, strict=True)}) for row in factors]

    assert sum(bool(compare_accounts(side(), side()).causes) for _ in range(pairs)) <= 0.04 * pairs


def test_what_is_certain_together_is_named_before_what_only_its_own_interval_shows():
    """The exposed all-reduce grew by more, in all likelihood; of the optimizer there is no doubt."""
    before, after = launches({**STEP, SEND: 30.0}), launches({**STEP, SEND: 45.0, OPTIMIZER: 21.0}, seed=1)
    longer([*before, *after], SEND, (-7, 6, 0, 7, 7, -6, -7, 6))
    found = compare_accounts(before, after)
    (exposed,) = (part for part in found.parts if part.name == EXPOSED)
    assert (found.decided, excludes_zero(exposed), exposed.change_ms > 13) == (True, True, True)
    assert named(found) == ["optimizer"]
