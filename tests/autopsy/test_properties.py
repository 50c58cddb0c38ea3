"""What holds of every job: healthy ranks are never accused, order does not matter, and missing evidence takes certainty
away and never adds a culprit.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aorta.autopsy.evidence import RankEvidence, RankExit
from aorta.autopsy.judge import judge
from tests.autopsy.hangs import (
    Fault,
    Program,
    clipped,
    ddp,
    ended_in,
    pipeline,
    resized,
    run,
    skipped,
    stopped_in,
    stuck_in,
    swapped,
    two_groups,
)

layouts: st.SearchStrategy[dict[int, Program]] = st.one_of(
    st.builds(ddp, st.integers(2, 6), st.just(4)),
    st.builds(clipped, st.integers(2, 6), st.just(4)),
    st.builds(two_groups, st.integers(2, 6)),
    st.builds(pipeline, st.integers(2, 3), st.just(4)),
)
faults: st.SearchStrategy[Fault] = st.one_of(
    st.builds(stuck_in, st.sampled_from(["data", "optimizer"]), st.integers(0, 3)),
    st.builds(stopped_in, st.just("data"), st.integers(0, 3)),
    st.builds(ended_in, st.just("optimizer"), st.just(RankExit(signal="SIGKILL")), st.integers(0, 3)),
    st.builds(skipped, st.integers(0, 6)),
    st.builds(swapped, st.integers(0, 6)),
    st.builds(resized, st.integers(0, 6)),
)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[RankEvidence], set[int]]:
    """A job with one or two faults, and the ranks that have them: a minority, whom the others can be held against."""
    programs = draw(layouts)
    most = 2 if len(programs) > 4 else 1
    faulty = draw(st.sets(st.sampled_from(sorted(programs)), min_size=1, max_size=most))
    return run(programs, {rank: draw(faults) for rank in faulty}), faulty


def _accused(evidence: list[RankEvidence]) -> set[int]:
    return {one.rank for one in judge(evidence).culprits}


@given(jobs())
def test_no_healthy_rank_is_accused(job: tuple[list[RankEvidence], set[int]]) -> None:
    evidence, faulty = job
    assert _accused(evidence) <= faulty


@given(jobs(), st.data())
def test_the_order_of_evidence_does_not_matter(job: tuple[list[RankEvidence], set[int]], data: st.DataObject) -> None:
    evidence, _ = job
    assert judge(data.draw(st.permutations(evidence))) == judge(evidence)


@given(jobs(), st.data())
def test_missing_evidence_adds_no_culprit(job: tuple[list[RankEvidence], set[int]], data: st.DataObject) -> None:
    evidence, _ = job
    left = data.draw(st.lists(st.sampled_from(evidence), unique_by=lambda one: one.rank, min_size=1))
    fewer, everything = judge(left), judge(evidence)
    accused = {one.rank for one in fewer.culprits}
    assert accused <= {one.rank for one in everything.culprits}
    if {one.rank for one in everything.culprits} and not accused:
        assert fewer.kind in ("cannot_decide", "not_stuck")


@given(layouts)
def test_a_job_that_runs_to_its_end_accuses_nobody(programs: dict[int, Program]) -> None:
    assert judge(run(programs)).kind == "not_stuck"


@given(layouts, st.integers(1, 40), st.integers(0, 9))
def test_a_job_that_moves_is_not_stuck(programs: dict[int, Program], until: int, age_s: int) -> None:
    evidence = run(programs, until=until)
    for one in evidence:
        one.taken_ns = max(each.progress_ns or 0 for each in evidence) + age_s * 1_000_000_000
    assert judge(evidence, stuck_after_s=10).kind in ("not_stuck", "slow")
