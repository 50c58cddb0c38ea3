"""The page as text: what it says, what it loads (nothing), what it escapes, how large it is."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
from typing import Any

import pytest

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.cautions import alerts
from aorta.documents.comparison import FactDifference
from aorta.documents.dataset import Ends
from aorta.documents.formatting import PAGE
from aorta.documents.metrics import NOT_SHOWN, SHOWN_FIRST
from aorta.read.record import load_run
from aorta.records.schema import Step
from aorta.report.page.charts import NUMBERS, Chart, new_chart, round_sizes
from aorta.report.page.elements import verdict_of
from aorta.report.run_tables import comparison_table, definitions_table
from aorta.report.summary import summarize
from aorta.report.tables import page_table
from aorta.report.text import brief_text
from tests.analysis.builders import metrics, simulated_run, step
from tests.analysis.run_builders import recorded
from tests.report.pages import Parts, as_bokeh, compared, page, read_document, sampled, subjects, text_of, two_sets

HALF_HIDDEN = "50\u00a0% of communication hidden"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    datasets, summary = two_sets(folder)
    return summary, page(datasets, summary, folder / "report.html")


@pytest.fixture
def summary(written):
    """The summary of two launch sets, to be changed."""
    return copy.deepcopy(written[0])


@pytest.fixture
def run_of(tmp_path):
    """Makes a run whose ranks have steps of these metrics."""

    def made(label: str, *overlaps: dict[str, float | None], ranks: int = 2, **more: Any) -> LabelledRun:
        def of_rank(rank: int) -> list[Step]:
            return [step(rank, ranks, at, overlap=overlap) for at, overlap in enumerate(overlaps)]

        return recorded(tmp_path / label, of_rank, ranks, label=label, **more)

    return made


def test_its_policy_forbids_the_network_and_names_every_script(written):
    parts = Parts(written[1])
    told = next(each["content"] for each in parts.named("meta") if each.get("http-equiv") == "Content-Security-Policy")
    assert told is not None
    rules = dict(rule.strip().split(" ", 1) for rule in told.split(";"))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in rules["script-src"]
    run = [
        text
        for script, text in zip(parts.named("script"), parts.scripts, strict=True)
        if script.get("type") != "application/json"
    ]
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in run}
    assert hashes == set(rules["script-src"].split())


def test_bokeh_knows_every_model_of_a_page(tmp_path):
    """Classes, names and values, of a run with samples of its devices and of two compared."""
    made = {name: sampled(simulated_run(tmp_path / name, label=name, ranks=2, steps=20)) for name in ("cuda", "rocm")}
    datasets = {name: LabelledRun(name, load_run(where)) for name, where in made.items()}
    html = page(datasets, compared(datasets), tmp_path / "r.html")
    data = json.loads(Parts(html).scripts[0])
    assert [figure.name for figure in read_document(data["document"])] == list(data["roots"])
    assert {"timeline-1", "steps-device_sclk_mhz", "bandwidth"} <= set(data["roots"])


def test_its_numbers_are_those_of_the_summary(written):
    summary, html = written
    text = text_of(html)
    table = html[html.index('id="table-metrics"') :]
    zeros = text[text.index("0 on both sides:") :].partition(".")[0].replace(" Not", "") + ","
    for name, pair in summary.comparison.metrics.items():
        values = {"reference": pair.reference.value, "candidate": pair.candidate.value}
        if None in values.values() or name in NOT_SHOWN or f"{name}," in zeros:
            continue
        row = re.search(rf'<tr><th scope="row"[^>]*>{name}</th>(.*?)</tr>', table)
        assert row is not None, name
        cells = re.findall(r'<td(?: data-sort="([^"]*)")?[^>]*>([^<]*)</td>', row[1])
        for (sort, shown), side in zip(cells[1:], ("reference", "candidate"), strict=False):
            assert (float(sort), shown) == (values[side], PAGE.quantity(values[side], pair.unit))
    for row in summary.datasets["rocm"].collectives:
        assert PAGE.number(row.busbw_gb_per_s.median, "GB/s") in text
    for name, told in summary.metrics.items():
        assert name in text
        assert " ".join(told.definition.split()) in text


def test_a_metric_is_better_lower_higher_or_neither(summary):
    better = [row[2].text for row in page_table(definitions_table(summary.metrics)).rows]
    assert better == [definition.better or "neither" for definition in summary.metrics.values()]
    assert set(better) == {"lower", "higher", "neither"}


def test_the_verdict_comes_first_with_what_it_rests_on(written):
    summary, html = written
    parts, text = Parts(html), text_of(html)
    sections = [attributes["id"] for tag, attributes in parts.tags if tag == "section"]
    assert sections[0] == "verdict"
    assert text.index("Slower") < text.index("overlap_ratio")
    pair = summary.comparison.metrics["overlap_ratio"]
    assert " ".join(PAGE.effect(pair.test.effect.value, "difference").split()) in text
    assert re.search(r"Smallest detectable effect: [\d.]+ % \(80 % power\)", text)
    assert "4 launches per side; intervals at 95 %" in text
    account = summary.comparison.account
    assert account.sentence.replace("->", "→") in text
    for row in (account.step, *account.parts):
        assert PAGE.number(row.reference_ms, "ms") in text
    assert f"Gate: fail (exit code 3). overlap_ratio<-0.05: {summary.gate.conditions[0].reason}" in text
    assert "killed (no footer)" in text


@pytest.mark.parametrize(
    ("verdict", "word", "tone"),
    [
        ("regression", "Slower", "bad"),
        ("improvement", "Faster", "good"),
        ("equivalent", "Equivalent", "even"),
        ("inconclusive", "Inconclusive", "open"),
    ],
)
def test_every_verdict_has_a_word_and_a_tone(verdict, word, tone, summary):
    summary.comparison.verdict = verdict
    for metric in summary.comparison.metrics.values():
        metric.test.verdict = verdict
    found = verdict_of(summary)
    assert (found.word, found.tone) == (word, tone)


def test_not_comparable_is_the_word_and_leaves_deltas_out(summary):
    key, compared = "config.workload.model_dim", summary.comparison
    compared.unlike, compared.manifest_differences = [key], [FactDifference(key, 64, 128)]
    compared.warnings = ["something else"]
    found = verdict_of(summary)
    assert alerts(summary.datasets, compared)[1:] == ["something else"]
    assert found.word == "Not comparable"
    assert {card.change for card in found.cards} == {""}
    table = page_table(comparison_table(compared))
    columns = [column.heading for column in table.columns]
    for row in table.rows:
        assert {row[columns.index(name)].text for name in ("change", "interval")} == {"\u2013"}


@pytest.mark.parametrize(
    ("least", "most", "ticks"),
    [
        (1_000, 50_000_000, [100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000]),
        (524_288, 26_214_400, [500_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000, 20_000_000, 50_000_000]),
        (530_000, 1_070_000, [500_000, 1_000_000, 2_000_000]),
        (4_096, 4_096, [2_000, 5_000]),
        (1, 1, [1, 2]),
    ],
)
def test_an_axis_of_sizes_has_round_ones_in_one_notation(least, most, ticks):
    assert round_sizes(least, most) == ticks


@pytest.mark.parametrize(
    ("comm", "hidden", "ranks", "word", "cards"),
    [
        (8.0, 4.0, 2, f"{HALF_HIDDEN}; 4\u00a0ms exposed in a step of 20\u00a0ms", list(SHOWN_FIRST)),
        (0.0, 0.0, 2, "No communication: nothing to hide; steps of 20\u00a0ms", ["job_step_ms"]),
        (8.0, 4.0, 1, "One rank: nothing to hide; steps of 20\u00a0ms", ["job_step_ms"]),
    ],
)
def test_a_single_run_is_headed_by_its_result(run_of, comm, hidden, ranks, word, cards):
    found = verdict_of(summarize(subjects({"x": run_of("x", *[metrics(20, 10, comm, hidden)] * 4, ranks=ranks)})))
    assert (found.word, [card.name for card in found.cards]) == (word, cards)


@pytest.mark.parametrize(("least", "said"), [(0.2, "20 % to 60 % of communication hidden"), (0.0, "Overlap not known")])
def test_what_few_steps_bound_is_shown_as_it_is_headed(run_of, tmp_path, least, said):
    alone = summarize(subjects({"a": run_of("a", *[metrics(40, 10, 10, 2)] * 2)}))
    for name in ("overlap_ratio", "exposed_comm_ms"):
        entry = alone.datasets["a"].metrics[name]
        entry.value = entry.median = entry.mean = entry.ratio_of_sums = entry.p5 = entry.p95 = None
        entry.bounds, entry.reason = Ends(least, 0.6 if least else 1.0), "rows are lost"
    text = brief_text(alone, [tmp_path / "summary.json"], {"a": []})
    assert text.startswith(f"a: {said}")
    assert "\nmedians of 2 steps" in text
    (row,) = (line for line in text.splitlines() if line.startswith("overlap_ratio "))
    assert ("20 % to at most 60 %" if least else "at most 100 %") in row


@pytest.mark.parametrize(
    ("steps", "ratio", "role", "sentence"),
    [  # hidden 8 of 10 ms and 0 of 40 ms: .8 and 0, 8 of 50 in all; of six steps three and three
        (2, 16, "mean", "Means, and the overlap as a ratio of sums, of 2 steps on 2 ranks, warm-up left out."),
        (6, 40, "median", "Medians of 6 steps on 2 ranks, warm-up left out."),
    ],
)
def test_few_steps_are_headed_by_the_ratio_of_sums_and_every_screen_says_of_what(
    run_of, tmp_path, steps, ratio, role, sentence
):
    few = steps == 2
    changing = [metrics(40, 10, 10, 8), metrics(80, 10, 40, 0)]
    datasets = {"a": run_of("a", *changing * (steps // 2)), "b": run_of("b", *[metrics(40, 10, 10, 2)] * steps)}
    alone = summarize(subjects({"a": datasets["a"]}))
    found = verdict_of(alone)
    assert found.word == f"{ratio}\u00a0% of communication hidden; 21\u00a0ms exposed in a step of 60\u00a0ms"
    roles = {card.name: card.role for card in found.cards}
    assert roles["overlap_ratio"] == ("ratio of sums" if few else "median")
    assert roles["exposed_comm_ms"] == roles["job_step_ms"] == role
    assert found.sentence.startswith(sentence)
    text = brief_text(alone, [tmp_path / "summary.json"], {"a": []})
    assert str(ratio) in text.splitlines()[0]
    assert f"\n{sentence.partition(', warm-up')[0].lower()}" in text
    assert ("over all" in text) == few
    # A comparison leads with what its sides lead with.
    summary = summarize(subjects(datasets), *datasets)
    for name in ("overlap_ratio", "exposed_comm_ms", "comm_ms"):
        leads = "median" if not few else "ratio_of_sums" if name == "overlap_ratio" else "mean"
        sides = [getattr(entry.metrics[name], leads) for entry in summary.datasets.values()]
        compared = summary.comparison.metrics[name]
        assert [compared.reference.value, compared.candidate.value] == sides
    html = page(datasets, summary, tmp_path / "r.html")
    assert ("Metrics: means, and the overlap as a ratio of sums" in text_of(html)) == few


def test_one_step_has_no_curves_and_every_chart_has_its_place(tmp_path):
    made = recorded(tmp_path / "run", lambda rank: [step(rank, 2, 7, overlap=metrics(10 + rank, 8, 4, 1))], 2)
    html = page({"x": made}, summarize(subjects({"x": made})), tmp_path / "r.html")
    assert "Nothing was compared" in text_of(html)
    parts = Parts(html)
    ids = [attributes["id"] for _, attributes in parts.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    assert not {"kernels", "chart-launches-job_step_ms", "chart-steps-overlap_ratio", "chart-steps-job_step"} & set(ids)
    drawn = json.loads(parts.scripts[0])["roots"]
    assert {f"chart-{name}" for name in drawn} <= set(ids)
    (plot,) = as_bokeh([Chart("", "", new_chart("any", 100, "step", "ms"))])
    assert [axis.formatter.format for axis in (*plot.below, *plot.left)] == [NUMBERS, NUMBERS]


def test_ranks_with_another_environment_or_library_are_named(run_of, tmp_path):
    other = {"environment_differences": {"2": {"NCCL_ALGO": "Tree"}}, "collective_library_differences": {"3": None}}
    datasets = {"x": run_of("x", *[metrics(10, 8, 4, 2)] * 4, ranks=1, manifest=other)}
    text = text_of(page(datasets, summarize(subjects(datasets)), tmp_path / "r.html"))
    assert "x: another environment than that of rank 0 on rank 2" in text
    assert "environment_differences.2.NCCL_ALGO Tree" in text
    assert "x: another collective library than that of rank 0 on rank 3" in text
