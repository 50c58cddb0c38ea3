"""Stand-in for rocprofv3: takes some of the options that the real parser documents, and refuses others with exit 2.

Enters: rocprofv3's command line; STANDIN_TRACES, for how many ranks results are to be written. Leaves: `argv` in the
folder of -d, one argument a line, the results, and then becomes the program behind `--`, as the real one does. Without
a tracing option it warns and writes no result; --stats alone is fatal. Results hold a kernel unless STANDIN_IDLE=1.
STANDIN_OLD=1 plays a build of ROCm 6: no rocpd, no --rccl-trace, no --process-sync.
"""

import argparse
import os
import pathlib
import sys

old = os.environ.get("STANDIN_OLD") == "1"
parser = argparse.ArgumentParser(prog="rocprofv3", allow_abbrev=False)
TRACING = ["kernel-trace", "memory-copy-trace", "marker-trace", "hip-trace", "rccl-trace"]
for name in (*TRACING, "stats", "group-by-queue", "att", "process-sync"):
    if not (old and name in ("rccl-trace", "process-sync")):
        parser.add_argument(f"--{name}", nargs="?", const="yes", choices=["yes", "no"])
for name in ("pmc", "kernel-include-regex"):
    parser.add_argument(f"--{name}", nargs="+")
parser.add_argument("-d", "--output-directory")
parser.add_argument("-o", "--output-file")
formats = ["csv", "json", "pftrace", "otf2", *([] if old else ["rocpd"])]
parser.add_argument("-f", "--output-format", nargs="+", choices=formats)

given = sys.argv[1:]
split = given.index("--") if "--" in given else len(given)
parsed = parser.parse_args(given[:split])
tracing = any(vars(parsed).get(name.replace("-", "_")) == "yes" for name in TRACING)
if parsed.stats and not tracing:
    sys.exit("Fatal error: No tracing options were enabled for --stats option")
if not tracing and not parsed.pmc:
    sys.stderr.write("Warning: No tracing options were enabled.\n")
folder = pathlib.Path(parsed.output_directory)
(folder / "argv").write_text("".join(f"{word}\n" for word in given))
for rank in range(int(os.environ.get("STANDIN_TRACES", "0")) if tracing else 0):
    trace = folder / f"rank{rank}" / "4711_results.json"
    trace.parent.mkdir()
    record = '{"dispatch_info": {"kernel_id": 1}, "start_timestamp": 1, "end_timestamp": 2}'
    kernels = "" if os.environ.get("STANDIN_IDLE") == "1" else record
    trace.write_text('{"rocprofiler-sdk-tool": [{"buffer_records": {"kernel_dispatch": [' + kernels + "]}}]}")
program = given[split + 1 :]
os.execvp(program[0], program)
