"""JSON Schemas of what AORTA writes: a record's lines, `run.json`, `summary.json`.

    python -m aorta.analysis.json_schemas docs/schemas

Generated from the types that write and read the record (`records.schema`) and from `document_types`, so that no schema
is written by hand. Objects stay open: a later AORTA of the same version may add keys, never take one away. Must not
describe a field that the types do not have.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.analysis import document_types
from aorta.analysis.summary import SUMMARY_VERSION
from aorta.records import schema

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
FILES: Final = {
    "record": (schema.Line, schema.SCHEMA_VERSION, "A line of rank_<rank>_metrics.jsonl"),
    "run": (document_types.Manifest, schema.SCHEMA_VERSION, "The manifest run.json"),
    "summary": (document_types.Summary, SUMMARY_VERSION, "The summary summary.json of a report"),
}
"""Name -> type, version of the format, title. Its file is `<name>-<version>.schema.json`."""


def file_name(name: str) -> str:
    """The file of one of `FILES`."""
    return f"{name}-{FILES[name][1]}.schema.json"


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one of `FILES`."""
    kind, version, title = FILES[name]
    (root,), definitions = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    for module in (schema, document_types):
        for defined in definitions.keys() & vars(module).keys():
            _describe(definitions[defined], getattr(module, defined), version)
    root.pop("discriminator", None)  # OpenAPI's; the tag `record` is a constant of each line
    identity = {"$schema": DIALECT, "$id": f"urn:aorta:{name}:{version}", "version": version, "title": title}
    return {**identity, **root, "$defs": definitions}


def _describe(definition: dict[str, Any], struct: type[msgspec.Struct], version: int) -> None:
    """Names the columns of a row, which JSON only numbers; holds `schema_version`; joins the lines of descriptions."""
    for name, item in zip(struct.__struct_fields__, definition.get("prefixItems", ()), strict=False):
        item["title"] = name
    if "schema_version" in definition.get("properties", {}):
        definition["properties"]["schema_version"] = {"const": version}
    if "description" in definition:
        definition["description"] = " ".join(definition["description"].split())


def main(folder: Path) -> None:
    """Write all schemas."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / file_name(name)).write_text(json.dumps(json_schema(name), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
