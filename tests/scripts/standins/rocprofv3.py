"""Stand-in for rocprofv3: takes exactly the options the real parser documents, and refuses all others with exit 2.

Enters: rocprofv3's command line; STANDIN_TRACES, for how many ranks results are to be written. Leaves: `argv` in the
folder of -d, one argument a line, the results, and then becomes the program behind `--`, as the real one does.
STANDIN_OLD=1 plays a build of ROCm 6: no rocpd, no --rccl-trace, no --process-sync.
"""

import argparse
import os
import pathlib
import sys

old = os.environ.get("STANDIN_OLD") == "1"
parser = argparse.ArgumentParser(prog="rocprofv3", allow_abbrev=False)
traces = (
    "kernel-trace memory-copy-trace marker-trace hip-trace hip-runtime-trace hip-compiler-trace hsa-trace "
    "runtime-trace sys-trace stats summary selected-regions disable-signal-handlers group-by-queue att echo "
    "attach mangled-kernels truncate-kernels"
)
for name in [*traces.split(), *([] if old else ["rccl-trace", "process-sync"])]:
    parser.add_argument(f"--{name}", nargs="?", const="yes", choices=["yes", "no"])
values = (
    "collection-period collection-period-unit kernel-include-regex kernel-exclude-regex kernel-iteration-range "
    "minimum-output-data agent-index pmc log-level att-library-path summary-groups"
)
for name in values.split():
    parser.add_argument(f"--{name}", nargs="+")
parser.add_argument("-d", "--output-directory")
parser.add_argument("-o", "--output-file")
formats = ["csv", "json", "pftrace", "otf2", *([] if old else ["rocpd"])]
parser.add_argument("-f", "--output-format", nargs="+", choices=formats)

given = sys.argv[1:]
split = given.index("--") if "--" in given else len(given)
parsed = parser.parse_args(given[:split])
folder = pathlib.Path(parsed.output_directory)
(folder / "argv").write_text("".join(f"{word}\n" for word in given))
for rank in range(int(os.environ.get("STANDIN_TRACES", "0"))):
    trace = folder / f"rank{rank}" / "4711_results.json"
    trace.parent.mkdir()
    trace.write_text("{}")
program = given[split + 1 :]
os.execvp(program[0], program)
