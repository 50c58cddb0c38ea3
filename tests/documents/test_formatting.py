"""How sizes and numbers are written."""

from __future__ import annotations

import pytest

from aorta.documents.comparison import Effect
from aorta.documents.formatting import PAGE, TEXT, group_title, json_text, p_value, rough_ms, rough_percent


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "unknown size"),
        (-1, "unknown size"),
        (0, "0 B"),
        (999, "999 B"),
        (8_000, "8 kB"),
        (1_048_576, "1.05 MB"),
        (25_000_000, "25 MB"),
        (26_214_400, "26.2 MB"),
        (100_000_000, "100 MB"),
        (999_999, "1000 kB"),
        (3_840_000_000, "3.84 GB"),
    ],
)
def test_bytes_have_three_digits(count: int | None, text: str) -> None:
    assert TEXT.size(count) == text


def test_a_size_of_the_page_stays_on_one_line_and_never_becomes_an_exponent() -> None:
    assert PAGE.size(25_000_000) == "25\u00a0MB"
    assert PAGE.size(999_999) == "1000\u00a0kB"
    assert PAGE.size(None) == "size unknown"


def test_numbers_have_the_digits_of_their_unit() -> None:
    assert [TEXT.number(1.23456, unit) for unit in ("ms", "ratio", "GB/s")] == ["1.23", "123.5 %", "1.23"]
    assert TEXT.number(None, "ms") == "unknown"


def test_the_page_separates_thousands_and_has_a_real_minus_sign() -> None:
    assert PAGE.number(1234.5678, "ms") == "1,235"
    assert PAGE.number(-0.25, "ratio") == "\u221225\u00a0%"
    assert PAGE.number(None, "ms") == "\u2013"
    assert [PAGE.count(1, "launch"), PAGE.count(1200, "launch")] == ["1 launch", "1,200 launches"]


@pytest.mark.parametrize(
    ("value", "kind", "text", "page"),
    [
        (-0.123, "difference", "-12.3 points", "\u221212.3\u00a0points"),
        (0.084, "quotient", "+8.4 %", "+8.4\u00a0%"),
        (None, "quotient", "unknown", "\u2013"),
    ],
)
def test_an_effect_has_its_sign_in_both_media(value: float | None, kind: str, text: str, page: str) -> None:
    assert [TEXT.effect(value, kind), PAGE.effect(value, kind)] == [text, page]


def test_an_interval_names_its_unit_once_and_is_unknown_with_one_end() -> None:
    assert PAGE.interval(Effect("quotient", 0.0, -0.01, 0.02)) == "\u22121 to +2\u00a0%"
    assert PAGE.interval(Effect("quotient", 0.0, -0.01, None)) == PAGE.unknown


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123, "0.012 ms"), (0.0001, "<0.001 ms"), (-1.26, "1.26 ms"), (99.96, "100 ms"), (123.4, "123 ms")],
)
def test_milliseconds_of_a_sentence_have_about_three_digits_and_no_sign(value: float, text: str) -> None:
    assert rough_ms(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (0.004, "less than 1 %"), (0.5, "50 %"), (0.996, "over 99 %"), (0.9996, "100 %"), (-0.2, "-20 %")],
)
def test_a_share_of_a_sentence_is_called_none_or_all_only_where_it_is(share: float, text: str) -> None:
    assert rough_percent(share) == text


def test_what_is_not_known_is_said_and_not_written_as_zero() -> None:
    assert [p_value(None), p_value(0.02857), p_value(0.02857, 3)] == [
        "unknown",
        "0.029",
        "0.0286",
    ]
    assert TEXT.quantity(None, "ms", signed=True) == "unknown"
    assert TEXT.percent(None) == "unknown"


def test_a_json_value_is_one_line() -> None:
    assert json_text({"a": None, "b": [True, 1.5], "c": {}}) == "a=null, b=true, 1.5, c=(none)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (164.918, "165"),
        (9.996, "10"),
        (54.781, "54.8"),
        (0.0123, "0.012"),
        (0.00004, "<0.001"),
        (0.0, "0"),
        (12345.6, "12346"),
    ],
)
def test_a_number_has_three_significant_digits_and_only_0_is_written_as_0(value: float, text: str) -> None:
    assert TEXT.number(value, "ms") == text
    assert TEXT.quantity(value, "ms") == f"{text} ms"


def test_a_share_is_in_per_cent_and_a_difference_of_shares_in_points() -> None:
    assert [TEXT.number(share, "ratio") for share in (0.561, 0.0, 0.00004)] == ["56.1 %", "0 %", "<0.1 %"]
    assert [TEXT.number(change, "ratio", signed=True) for change in (-0.48, 0.0)] == ["-48 points", "0 points"]
    assert [TEXT.number(change, "ms", signed=True) for change in (0.7184, -14.128)] == ["+0.718", "-14.1"]


MESH = {"replicate": 2, "shard": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("name", "members", "title"),
    [
        ("0", [range(8)], "default group"),
        ("3", [[0, 1]], "tensor, ranks 0-1"),
        ("3", [[1, 3]], "shard, ranks 1, 3"),
        ("3", [[0, 4], [1, 5]], "replicate"),
        ("3", [[0, 1], [0, 2]], "group 3"),
        ("3", [[0, 1, 2]], "group 3, ranks 0-2"),
        ("3", [range(8)], "group 3"),
        ("3", [range(0, 40, 2)], "group 3, ranks 0, 2, 4, 6, 8, 10, ..."),
        ("world", [], "group world"),
    ],
)
def test_a_group_is_called_by_its_dimension_of_the_mesh_and_its_ranks(
    name: str, members: list[list[int]], title: str
) -> None:
    assert group_title(name, members, MESH, 8) == title
