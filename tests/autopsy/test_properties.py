"""What holds of every job: healthy ranks are never accused, order does not matter, and missing evidence takes certainty
away and never adds a culprit.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aorta.autopsy.evidence import RankEvidence, RankExit
from aorta.autopsy.judge import judge
from tests.autopsy import hangs

layouts: st.SearchStrategy[dict[int, hangs.Program]] = st.one_of(
    st.builds(hangs.ddp, st.integers(2, 6), st.just(4)),
    st.builds(hangs.clipped, st.integers(2, 6), st.just(4)),
    st.builds(hangs.two_groups, st.integers(2, 6)),
    st.builds(hangs.pipeline, st.integers(2, 3), st.just(4)),
)
faults: st.SearchStrategy[hangs.Fault] = st.one_of(
    st.builds(hangs.stuck_in, st.sampled_from(["data", "optimizer"]), st.integers(0, 3)),
    st.builds(hangs.stopped_in, st.just("data"), st.integers(0, 3)),
    st.builds(hangs.ended_in, st.just("optimizer"), st.just(RankExit(signal="SIGKILL")), st.integers(0, 3)),
    st.builds(hangs.skipped, st.integers(0, 6)),
    st.builds(hangs.swapped, st.integers(0, 6)),
    st.builds(hangs.resized, st.integers(0, 6)),
)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[RankEvidence], set[int]]:
    """A job with one or two faults, and the ranks that have them: a minority, whom the others can be held against."""
    programs = draw(layouts)
    most = 2 if len(programs) > 4 else 1
    faulty = draw(st.sets(st.sampled_from(sorted(programs)), min_size=1, max_size=most))
    return hangs.run(programs, {rank: draw(faults) for rank in faulty}), faulty


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
def test_a_job_that_runs_to_its_end_accuses_nobody(programs: dict[int, hangs.Program]) -> None:
    assert judge(hangs.run(programs)).kind == "not_stuck"


@given(layouts, st.integers(1, 40), st.integers(0, 9))
def test_a_job_that_moves_is_not_stuck(programs: dict[int, hangs.Program], until: int, age_s: int) -> None:
    evidence = hangs.run(programs, until=until)
    for one in evidence:
        one.taken_ns = max(each.progress_ns or 0 for each in evidence) + age_s * 1_000_000_000
    assert judge(evidence, stuck_after_s=10).kind in ("not_stuck", "slow")
