"""Writes a gate's result as JUnit XML, one test case per condition, for CI systems.

The shape follows the schema that Jenkins' xUnit plug-in publishes (junit-10.xsd); GitHub, GitLab and Azure read the
same. A failed condition is a `failure`. An inconclusive one is an `error`, or what `--inconclusive` makes of it:
`failure` or `skipped`. Times are left out, because nothing was timed. Must not: let text from a file or a label become
markup, or a character that XML does not allow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from xml.etree import ElementTree

from aorta.analysis.gate.gate_checks import GateResult, Judged
from aorta.analysis.gate.gate_text import headline, interval, quantity

_NOT_XML: Final = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Everything outside the production Char of XML 1.0, section 2.2."""
_UNDECIDED: Final = {"4": "error", "fail": "failure", "pass": "skipped"}


def junit_xml(result: GateResult, comparison: Mapping[str, Any]) -> str:
    """The XML document with its declaration; ends with a newline."""
    elements = [_element_name(result, judged) for judged in result.conditions]
    counts = {
        "tests": str(len(elements)),
        "failures": str(elements.count("failure")),
        "errors": str(elements.count("error")),
    }
    root = ElementTree.Element("testsuites", {"name": "aorta gate", **counts})
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": _clean(_name(comparison)), **counts, "skipped": str(elements.count("skipped"))}
    )
    for judged, element in zip(result.conditions, elements, strict=True):
        case = ElementTree.SubElement(
            suite, "testcase", {"name": _clean(judged.condition), "classname": f"aorta.gate.{_clean(judged.metric)}"}
        )
        said = f"{quantity(judged, judged.value)}: {judged.reason}"
        if element is not None:
            attributes = {"message": _clean(said)} | ({} if element == "skipped" else {"type": judged.outcome})
            ElementTree.SubElement(case, element, attributes).text = _clean(_details(judged, comparison))
        ElementTree.SubElement(case, "system-out").text = _clean(said)
    ElementTree.SubElement(suite, "system-out").text = _clean(headline(result))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _element_name(result: GateResult, judged: Judged) -> str | None:
    return {"pass": None, "fail": "failure", "inconclusive": _UNDECIDED[result.on_inconclusive]}[judged.outcome]


def _name(comparison: Mapping[str, Any]) -> str:
    return f"{comparison['candidate']} against {comparison['reference']}"


def _details(judged: Judged, comparison: Mapping[str, Any]) -> str:
    lines = [
        _name(comparison),
        f"condition: {judged.condition}",
        f"measured: {quantity(judged, judged.value)}, interval {interval(judged)}, "
        f"p {'null' if judged.p is None else format(judged.p, '.3g')}",
        f"reason: {judged.reason}",
    ]
    attribution = comparison.get("attribution") or {}
    return "\n".join([*lines, *filter(None, [attribution.get("sentence")])])


def _clean(text: str) -> str:
    """Replace characters that XML cannot hold even when escaped by the replacement character."""
    return _NOT_XML.sub("\ufffd", text)
