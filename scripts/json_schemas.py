"""JSON Schemas of what AORTA writes: a record's lines, `run.json`, `summary.json`, the verdict of an autopsy.

    python -m scripts.json_schemas docs/schemas

Generated from the types that write and read the record (`records.schema`) and from those of the documents
(`aorta.documents`, `aorta.autopsy.evidence`; `scripts.run_manifest`), so that no schema is written by hand. Objects
stay open: a later AORTA of the same version may add keys, never take one away. Must not describe a field that the types
do not have.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.autopsy import evidence
from aorta.documents import comparison
from aorta.records import schema
from aorta.records.files import write_whole
from aorta.report.summary import SUMMARY_VERSION
from scripts import run_manifest

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
FILES: Final = {
    "record": (schema.Line, schema.SCHEMA_VERSION, "A line of rank_<rank>_metrics.jsonl"),
    "run": (run_manifest.Manifest, schema.SCHEMA_VERSION, "The manifest run.json"),
    "summary": (comparison.Summary, SUMMARY_VERSION, "The summary summary.json of a report"),
    "autopsy": (evidence.Verdict, evidence.AUTOPSY_VERSION, "The verdict of `aorta autopsy --json`"),
}
"""Name -> type, version of the format, title. Its file is `<name>-<version>.schema.json`."""


def file_name(name: str) -> str:
    """Return the file of one of `FILES`."""
    return f"{name}-{FILES[name][1]}.schema.json"


def json_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of one of `FILES`."""
    kind, version, title = FILES[name]
    (root,), definitions = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    for defined, definition in definitions.items():
        if "prefixItems" in definition:  # the columns of a row, which JSON only numbers
            for column, item in zip(
                getattr(schema, defined).__struct_fields__, definition["prefixItems"], strict=False
            ):
                item["title"] = column
        if "schema_version" in definition.get("properties", {}):
            definition["properties"]["schema_version"] = {"const": version}
        if "description" in definition:
            definition["description"] = " ".join(definition["description"].split())
    root.pop("discriminator", None)  # OpenAPI's; the tag `record` is a constant of each line
    identity = {"$schema": DIALECT, "$id": f"urn:aorta:{name}:{version}", "version": version, "title": title}
    return {**identity, **root, "$defs": definitions}


def main(folder: Path) -> None:
    """Write all schemas."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        write_whole(folder / file_name(name), json.dumps(json_schema(name), indent=2).encode() + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
