"""The analysis as JSON: its functions with the structs that they take and return as plain dictionaries.

Tests write what a document holds by hand, as far as their rule needs it, and read results by the keys of the file.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, MutableMapping
from functools import wraps
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from aorta.analysis import aggregate as _aggregate
from aorta.analysis import cautions as _cautions
from aorta.analysis import gate
from aorta.analysis.attribution import attribute as _attribute
from aorta.analysis.compare import headline as _headline
from aorta.analysis.compare import run_comparison
from aorta.analysis.compare import verdict as _verdict
from aorta.documents import as_json, known
from aorta.documents import statistics as _stats
from aorta.documents.comparison import ComparedMetric, Comparison, GateEntry, LaunchTest, Summary
from aorta.documents.metrics import metric_named
from aorta.report import summary as _summary


def built(kind: Any, found: Any) -> Any:
    """The struct of a type from JSON. What the JSON leaves out of a list or an object is empty, and null otherwise."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return built(arguments[0], found)
    if origin in (Union, types.UnionType):
        return built(next(each for each in arguments if each is not types.NoneType), found)
    if isinstance(found, Mapping) and origin is not None:
        return {key: built(arguments[1], each) for key, each in found.items()}
    if isinstance(found, list | tuple) and origin is not None and arguments:
        return [built(arguments[0], each) for each in found]
    if not isinstance(found, Mapping) or not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return found
    hints = get_type_hints(kind, include_extras=True)
    given = {name: built(hints[name], each) for name, each in found.items() if name in hints}
    empty = {
        field.name: _empty(hints[field.name])
        for field in msgspec.structs.fields(kind)
        if field.required and field.name not in given
    }
    return kind(**given, **empty)


def _empty(kind: Any) -> Any:
    if get_origin(kind) is Annotated:
        return _empty(get_args(kind)[0])
    return get_origin(kind)() if get_origin(kind) in (list, dict) else None


def by_json(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with JSON in place of structs."""
    hints, signature = get_type_hints(function), inspect.signature(function)

    @wraps(function)
    def called(*args: Any, **words: Any) -> Any:
        bound = signature.bind(*args, **words)
        for name, value in bound.arguments.items():
            if name in hints:
                bound.arguments[name] = built(hints[name], value)
        result = function(*bound.args, **bound.kwargs)
        return as_json(result) if isinstance(result, msgspec.Struct) else result

    return called


aggregate = by_json(_aggregate.aggregate)
attribute = by_json(_attribute.attribute)
describe = by_json(_stats.describe)
headline, numbers_line, evidence, title = map(
    by_json, (_headline.headline, _headline.numbers, _headline.evidence, _headline.title)
)
markdown_summary = by_json(gate.markdown_summary)
slower = by_json(_verdict.slower)
summarize = by_json(_summary.summarize)
changes_the_work = by_json(run_comparison.changes_the_work)


def compare(reference: Any, candidate: Any, before: Any, after: Any, **words: Any) -> Any:
    """Two runs, by the entries of their datasets."""
    entries = [built(_aggregate.DatasetEntry, entry) for entry in (before, after)]
    values = tuple(entry.described for entry in entries)
    matched, paces = tuple(entry.matched for entry in entries), [[known(entry.pace)] for entry in entries]
    return as_json(run_comparison.compare((reference, candidate), values, matched, paces, **words))


def numbers(name: str, *args: Any) -> Any:
    """The statistics of a metric of two launch sets."""
    return as_json(_verdict.launch_test(name, *args))


def intervals(name: str, left: Any, right: Any, p: float, level: float) -> dict[str, Any]:
    """Effect and difference with their intervals."""
    kind = "difference" if metric_named(name).unit == "ratio" else "quotient"
    test = built(LaunchTest, {"p": p, "effect": {"kind": kind}})
    _verdict.add_intervals(test, left, right, level)
    found = as_json(test)
    return {key: found[key] for key in ("effect", "difference_interval", "interval_level")}


def judge(metrics: Mapping[str, MutableMapping[str, Any]], *args: Any) -> Any:
    """The verdicts of metrics, which are added to them."""
    pairs = {name: built(ComparedMetric, entry) for name, entry in metrics.items()}
    found = _verdict.judge(pairs, *args)
    for name, entry in metrics.items():
        entry.update(as_json(pairs[name]))
    return found


def evaluate(conditions: Any, comparison: Any) -> GateEntry:
    """What a gate says of a comparison, as the struct."""
    return gate.evaluate(conditions, built(Comparison, comparison))


def ended(options: Any, summary: MutableMapping[str, Any]) -> tuple[int, str]:
    """How a gate ends, as the command does it; its result is added to the summary."""
    document = built(Summary, summary)
    gate.judge(options, document)
    summary.update(as_json(document))
    return gate.run_gate(options, document)


cautions = by_json(_cautions.cautions)
most_to_gain = by_json(_summary.most_to_gain)
