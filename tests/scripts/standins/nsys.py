"""Stand-in for Nsight Systems' `nsys`: takes some of its documented switches, and refuses all others with 1.

`nsys profile ... PROGRAM` runs the program, writes `<output>.nsys-rep` and ends with the program's code, as the real
one does; `nsys export` writes the database. STANDIN_NO_REPORT=1 and STANDIN_NO_EXPORT=1 leave these out, STANDIN_OLD=1
plays a build without --cpuctxsw. Like the real one it marks the program's environment with NSYS_PROFILING_SESSION_ID.
"""

import json
import os
import pathlib
import subprocess
import sys

PROFILE, EXPORT = ("trace", "sample", "cpuctxsw", "output", "wait"), ("type", "output")

command, *words = sys.argv[1:]
known = set(PROFILE if command == "profile" else EXPORT)
if os.environ.get("STANDIN_OLD") == "1":
    known -= {"cpuctxsw"}
if words == ["--help"]:
    sys.stdout.write("".join(f"\t--{name}=\n" for name in sorted(known)))
    sys.exit(0)
given = {}
while words and words[0].startswith("-"):
    word = words.pop(0)
    name, equals, value = word.removeprefix("--").partition("=")
    if not word.startswith("--") or name not in known or not equals:
        sys.exit(f"unrecognised option '{word}'")
    given[name] = value
with pathlib.Path(os.environ["RECORD"]).with_name("nsys.jsonl").open("a") as record:
    record.write(json.dumps([command, *sys.argv[2:]]) + "\n")
if command == "export":
    (source,) = words
    assert given["type"] == "sqlite"
    assert pathlib.Path(source).is_file()
    if os.environ.get("STANDIN_NO_EXPORT") == "1":
        sys.exit(1)
    pathlib.Path(given["output"]).write_text("a database")
    sys.exit(0)
code = subprocess.call(words, env={**os.environ, "NSYS_PROFILING_SESSION_ID": "4711"})
if os.environ.get("STANDIN_NO_REPORT") != "1":
    pathlib.Path(given["output"] + ".nsys-rep").write_text("a report")
sys.exit(code)
