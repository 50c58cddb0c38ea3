"""Conditions of a gate: which texts are, what they say, and what is said of the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.analysis.gate import Condition, parse_condition
from aorta.documents.metrics import STEP_METRIC_NAMES
from aorta.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("overlap_ratio<-0.05", ("overlap_ratio", "<", -0.05, False)),
        (" job_step_ms > 5 % ", ("job_step_ms", ">", 0.05, True)),
        ("ratio_delta<-.05", ("overlap_ratio", "<", -0.05, False)),
        ("exposed_allreduce_ms>1e1", ("exposed_allreduce_ms", ">", 10.0, False)),
        ("exposed_comm_ms>+2.5%", ("exposed_comm_ms", ">", 0.025, True)),
        ("idle_ms>3.", ("idle_ms", ">", 3.0, False)),
    ],
)
def test_what_is_read(text: str, expected: tuple[str, str, float, bool]) -> None:
    found = parse_condition(text)
    assert (found.metric, found.sign, found.threshold, found.relative) == pytest.approx(expected)
    assert found.text == text.strip()


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("overlap_ratio", 13, "no < or > in it"),
        ("<0.1", 0, "no metric before <"),
        ("overlap_ratio<=0.1", 14, "there is no <="),
        ("exposed_comm_ms=>5%", 15, "there is no =>"),
        ("overlap_ratio<0.1<0.2", 17, "a second comparison"),
        ("overlap_ratio<", 14, "'' is no number"),
        ("overlap_ratio<five", 14, "'five' is no number"),
        ("overlap_ratio< 0,5", 15, "'0,5' is no number"),
        ("overlap_ratio<5ms", 14, "'5ms' is no number"),
        ("overlap_ratio<nan", 14, "'nan' is no number"),
        ("overlap_ratio<inf", 14, "'inf' is no number"),
        ("overlap_ratio<1e999", 14, "1e999 is too large"),
        ("  overlap<0.1", 2, "'overlap' is no metric; did you mean overlap_ratio"),
        ("Overlap_Ratio<0.1", 0, "'Overlap_Ratio' is no metric; did you mean overlap_ratio"),
        ("speed>3", 0, "'speed' is no metric. Known metrics: overlap_ratio, exposed_comm_ms, "),
    ],
)
def test_what_is_refused_with_its_place(text: str, at: int, message: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_condition(text)
    said = str(raised.value)
    assert said.startswith(f"condition {text!r}: ")
    assert message in said
    assert said.splitlines()[-2:] == [f"    {text}", f"    {' ' * at}^"]
    assert raised.value.exit_code == 2


@given(st.sampled_from(STEP_METRIC_NAMES), st.sampled_from("<>"), st.floats(-1e6, 1e6), st.booleans())
def test_what_is_written_is_read_again(metric: str, sign: str, number: float, relative: bool) -> None:
    found = parse_condition(f"{metric}{sign}{number!r}{'%' if relative else ''}")
    assert (found.metric, found.sign, found.relative) == (metric, sign, relative)
    assert found.threshold == pytest.approx(number / 100 if relative else number)


@given(st.text(max_size=30))
def test_any_text_is_a_condition_or_an_error_in_words(text: str) -> None:
    try:
        found = parse_condition(text)
    except InputError:
        return
    assert isinstance(found, Condition)
