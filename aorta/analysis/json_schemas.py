"""JSON Schemas of what AORTA writes: a record's lines, `run.json`, `summary.json`, the verdict of an autopsy.

    python -m aorta.analysis.json_schemas docs/schemas

Generated from the types that write and read the record (`records.schema`) and from those of the documents
(`aorta.analysis.documents`, `aorta.autopsy.evidence`), so that no schema is written by hand. Objects stay open: a later
AORTA of the same version may add keys, never take one away. Must not describe a field that the types do not have.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.analysis.documents import Open, comparison, dataset, summary, traces
from aorta.analysis.summary import SUMMARY_VERSION
from aorta.autopsy import evidence
from aorta.records import schema
from aorta.records.files import write_whole

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
FILES: Final = {
    "record": (schema.Line, schema.SCHEMA_VERSION, "A line of rank_<rank>_metrics.jsonl"),
    "run": (summary.Manifest, schema.SCHEMA_VERSION, "The manifest run.json"),
    "summary": (summary.Summary, SUMMARY_VERSION, "The summary summary.json of a report"),
    "autopsy": (evidence.Verdict, evidence.AUTOPSY_VERSION, "The verdict of `aorta autopsy --json`"),
}
"""Name -> type, version of the format, title. Its file is `<name>-<version>.schema.json`."""
_MODULES: Final = (schema, dataset, traces, comparison, summary, evidence)


def file_name(name: str) -> str:
    """Return the file of one of `FILES`."""
    return f"{name}-{FILES[name][1]}.schema.json"


def json_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of one of `FILES`."""
    kind, version, title = FILES[name]
    (root,), definitions = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    opened = set()
    for module in _MODULES:
        for defined in definitions.keys() & vars(module).keys():
            struct = getattr(module, defined)
            _describe(definitions[defined], struct, version)
            opened |= {f"#/$defs/{defined}"} if issubclass(struct, Open) else set()
    root.pop("discriminator", None)  # OpenAPI's; the tag `record` is a constant of each line
    identity = {"$schema": DIALECT, "$id": f"urn:aorta:{name}:{version}", "version": version, "title": title}
    promised = {defined: _opened(each, opened) for defined, each in definitions.items()}
    mentioned = _references([root, *promised.values()])
    return {**identity, **root, "$defs": {defined: promised[defined] for defined in promised if defined in mentioned}}


def _describe(definition: dict[str, Any], struct: type[msgspec.Struct], version: int) -> None:
    """Name the columns of a row, which JSON only numbers; hold `schema_version`; leave out what is not promised; join
    the lines of descriptions.
    """
    for name, item in zip(struct.__struct_fields__, definition.get("prefixItems", ()), strict=False):
        item["title"] = name
    properties = definition.get("properties", {})
    if "schema_version" in properties:
        properties["schema_version"] = {"const": version}
    for name in [name for name, each in properties.items() if each.get("unpublished")]:
        del properties[name]
        if name in definition["required"]:
            definition["required"].remove(name)
    if "description" in definition:
        definition["description"] = " ".join(definition["description"].split())


def _opened(node: Any, opened: set[str]) -> Any:
    """Return a schema in which the structs that promise no keys are plain objects."""
    if isinstance(node, list):
        return [_opened(each, opened) for each in node]
    if not isinstance(node, dict):
        return node
    if node.get("$ref") in opened:
        return {"type": "object"}
    return {key: _opened(each, opened) for key, each in node.items()}


def _references(node: Any) -> set[str]:
    """Return the names of the definitions that a schema refers to."""
    if isinstance(node, list):
        return set().union(*map(_references, node))
    if not isinstance(node, dict):
        return set()
    own = {node["$ref"].removeprefix("#/$defs/")} if isinstance(node.get("$ref"), str) else set()
    return own.union(*map(_references, node.values()))


def main(folder: Path) -> None:
    """Write all schemas."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        write_whole(folder / file_name(name), json.dumps(json_schema(name), indent=2).encode() + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
