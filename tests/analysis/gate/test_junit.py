"""JUnit XML: of the shape that CI systems read, whatever words are in it."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.analysis.documents.comparison import GateEntry
from aorta.analysis.gate.gate_checks import parse_condition
from tests.analysis.by_json import evaluate, junit_xml
from tests.analysis.gate.comparisons import comparison, metric

CONDITIONS = [parse_condition(text) for text in ("idle_ms>1", "copy_ms>10%", "idle_ms>500%")]
COMPARED = comparison(idle_ms=metric(1, 5))

# junit-10.xsd of Jenkins' xUnit plug-in: element -> allowed attributes (* required), allowed children
RULES: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": ({"name", "tests", "failures", "errors", "time"}, set(), {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors", "skipped", "time", "timestamp", "hostname", "id", "package"},
        {"name"},
        {"properties", "testcase", "system-out", "system-err"},
    ),
    "testcase": (
        {"name", "classname", "assertions", "time", "status", "file"},
        {"name", "classname"},
        {"skipped", "error", "failure", "system-out", "system-err"},
    ),
    "failure": ({"message", "type"}, set(), set()),
    "error": ({"message", "type"}, set(), set()),
    "skipped": ({"message", "type"}, set(), set()),
    "system-out": (set(), set(), set()),
}


def check(element: ElementTree.Element) -> None:
    allowed, required, children = RULES[element.tag]
    assert required <= set(element.attrib) <= allowed, element.tag
    for child in element:
        assert child.tag in children, f"{child.tag} in {element.tag}"
        check(child)


def result(on_inconclusive: str = "4") -> GateEntry:
    return evaluate(CONDITIONS, COMPARED, on_inconclusive)


@pytest.mark.parametrize(("choice", "element"), [("4", "error"), ("fail", "failure"), ("pass", "skipped")])
def test_the_shape_and_the_counts(choice: str, element: str) -> None:
    root = ElementTree.fromstring(junit_xml(result(choice), COMPARED))
    check(root)
    (suite,) = root
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == ["idle_ms>1", "copy_ms>10%", "idle_ms>500%"]
    assert [[child.tag for child in case if child.tag != "system-out"] for case in cases] == [
        ["failure"],
        [element],
        [],
    ]
    for holder in (root, suite):
        for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            if holder.get(attribute) is not None:
                assert int(holder.get(attribute, "")) == len(list(holder.iter(tag)))
        assert holder.get("tests") == "3"
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert "+4.000 ms" in failure.get("message", "")


def test_the_attribution_stands_in_a_failure() -> None:
    sentence = "81 % of the 12.3 ms is <allgather> & more"
    root = ElementTree.fromstring(junit_xml(result(), {**COMPARED, "attribution": {"sentence": sentence}}))
    failure = root.find("testsuite/testcase/failure")
    assert failure is not None
    assert failure.text is not None
    assert failure.text.endswith(sentence)


@given(st.text(), st.text())
def test_any_label_gives_a_document_that_can_be_read(label: str, sentence: str) -> None:
    compared = {**COMPARED, "candidate": label, "attribution": {"sentence": sentence}}
    root = ElementTree.fromstring(junit_xml(result(), compared).encode("utf-8", "surrogatepass"))
    check(root)
    if label.isascii() and label.isprintable():
        assert root[0].get("name") == f"{label} against cuda"
