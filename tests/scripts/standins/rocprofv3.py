"""Stand-in for rocprofv3: takes exactly the options the real parser documents, and refuses all others with exit 2.

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
tracing_options = (
    "kernel-trace memory-copy-trace marker-trace hip-trace hip-runtime-trace hip-compiler-trace hsa-trace "
    "runtime-trace sys-trace rccl-trace"
)
switches = (
    "stats summary summary-per-domain selected-regions disable-signal-handlers group-by-queue att echo process-sync "
    "mangled-kernels truncate-kernels"
)
TRACING = tracing_options.split()
SHORT = {"runtime-trace": "-r", "sys-trace": "-s", "summary": "-S", "mangled-kernels": "-M", "truncate-kernels": "-T"}
for name in [*TRACING, *switches.split()]:
    if not (old and name in ("rccl-trace", "process-sync")):
        names = [f"--{name}", *([SHORT[name]] if name in SHORT else [])]
        parser.add_argument(*names, nargs="?", const="yes", choices=["yes", "no"])
values = (
    "collection-period collection-period-unit kernel-include-regex kernel-exclude-regex kernel-iteration-range "
    "minimum-output-data agent-index pmc log-level att-library-path summary-groups profile-mpi-ranks "
    "mpi-world-rank-variable mpi-world-size-variable attach-duration-msec"
)
for name in values.split():
    parser.add_argument(f"--{name}", nargs="+")
parser.add_argument("-i", "--input")
parser.add_argument("-p", "--pid", "--attach")
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
