"""Kernels of traces in a report and from `aorta kernels`: text, page and schema; answers are known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from aorta.documents.kernels import KernelEntries, TraceEntries
from aorta.report.run_commands import kernels_command
from aorta.report.summary import write_report
from aorta.report.tables import shortened
from aorta.report.text import kernel_block
from scripts.json_schemas import json_schema
from tests.analysis.builders import partial
from tests.read.kineto_files import ALLREDUCE, document, event, kernel
from tests.report.pages import text_of

GEMM = "nvjet_hsh_192x192_64x4"


def products(rank: int) -> list[dict[str, Any]]:
    """Twelve products, six alone (100 us) and six beside an all-reduce (150 us); the
    second and the first of the latter are launched late (after gaps of 100 and 900 us).
    """
    events = [kernel(ALLREDUCE, 2000, 2000, stream=20, External_id=99)]
    for at in range(12):
        start, length = (200 * at, 100) if at < 6 else (2000 + 200 * at - 1200, 150)
        launched = start - 10 if at == 1 else start - 150
        events += [
            event("cpu_op", "aten::mm", launched - 1, 5, 1, 1, **{"External id": at + 1}),
            event("cuda_runtime", "cudaLaunchKernel", launched, 2, 1, 1, correlation=at + 500),
            kernel(GEMM, start, length, External_id=at + 1, correlation=at + 500),
        ]
    return events


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    for rank in range(2):
        facts = {"backend": "nccl", "rank": rank, "world_size": 2}
        text = json.dumps(document(products(rank), distributedInfo=facts))
        (folder / f"rank{rank}.json").write_text(text)
    return folder


@pytest.fixture(scope="module")
def report(traces, tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    return write_report({"two": traces}, out), (out / "report.html").read_text()


def test_the_command_prints_every_kind(traces, capsys):
    assert kernels_command([str(traces)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        f"{GEMM} compute 24 3 0.125 0.026 42.9 %",
        f"{GEMM} rank 0, device 0 0.1 0.15 50 %",
        "rank 1, device 0 7 12 1.5 11 1.65 2 1",
    ):
        assert words in said


def test_text_and_page_of_the_report_have_what_there_is_of_each_kind(report):
    made, page = report
    assert f"{GEMM} compute" in " ".join(made.text.split())
    section = page[page.index('<section id="kernels"') :].partition("</section>")[0]
    for key in ("kernels", "slowdowns", "gaps"):
        assert f'id="table-{key}-two"' in section
    assert "coverage not known: a trace does not count what was issued" in text_of(page)
    assert "every collective was seen" not in text_of(page)
    assert GEMM in section


def test_the_summary_of_traces_fits_its_schema_which_notices_damage(report):
    summary = json.loads(json.dumps(report[0].summary))
    schema = Draft202012Validator(json_schema("summary"))
    schema.validate(summary)
    summary["datasets"]["two"]["traces"]["kernels"]["gaps"][0]["gap_ms"] = "many"
    assert not schema.is_valid(summary)


def test_names_are_one_line_that_a_terminal_only_prints():
    assert shortened("a\x1b[31m\nb", 40) == "a?[31m?b"
    assert shortened("", 10) == "(no name)"
    long = shortened("void kernel<" + "x" * 500 + ">(end)", 40)
    assert len(long) == 40
    assert long.startswith("void kernel<")
    assert long.endswith(">(end)")


def test_without_kernels_the_block_says_why():
    kernels = partial(KernelEntries, reasons={"totals": ["no kernel ran"]})
    assert kernel_block("old", partial(TraceEntries, kernels=kernels)) == "old: no kernels: no kernel ran"
