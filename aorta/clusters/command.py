"""Words of the command line -> a gathered run folder. `analysis/gather.py` only calls into here.

Enters: arguments. Leaves: text on stdout, `error: ...` on stderr, an exit code. Must not: copy itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from aorta.errors import EXIT_OK, AortaError, RunIncomplete


def gather_nodes(arguments: Sequence[str]) -> int:
    """Run `analysis/gather.py`; returns its exit code (argparse itself ends with 0 or 2)."""
    options = parser().parse_args(arguments)
    from aorta.clusters.gathering import gather

    try:
        gathered = gather(options.sources, Path(options.into), options.also)
        for source, count in gathered.files.items():
            sys.stdout.write(f"{source}: {count} files\n")
        for note in gathered.notes:
            sys.stdout.write(f"  ! {note}\n")
        sys.stdout.write(
            f"{gathered.folder}: run {gathered.run_id}, {len(gathered.ranks)} of {gathered.world_size} ranks, "
            f"{sum(gathered.files.values())} files, {gathered.size_bytes} bytes\n"
        )
        if gathered.missing:
            raise RunIncomplete(
                f"no record of rank {ranges(gathered.missing)} of {gathered.world_size}; what is there is in "
                f"{gathered.folder}. Gather it with the missing folders into a new one"
            )
    except AortaError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return EXIT_OK


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: `0-3, 7`."""
    runs = [[number for _, number in group] for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def parser() -> argparse.ArgumentParser:
    """The words that the command takes."""
    words = argparse.ArgumentParser(
        prog="gather.py",
        description="The output folders of several nodes without a shared disk -> one run folder.",
        epilog="Taken: records, run.json, clock_sync.json, rpc.json, logs/, torch_profiler/. History, checkpoints and "
        "other runs stay. A file that is in two folders must be the same in both. Nothing is overwritten, and after an "
        "error nothing is left. Exit codes: 0 done, 2 bad input, 5 ranks are missing (what is there is kept).",
    )
    words.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="a node's folder: a path, an fsspec URL, or HOST:/path (by sftp)"
    )
    words.add_argument("--into", required=True, metavar="DIR", help="a new folder")
    words.add_argument(
        "--also", action="append", default=[], metavar="NAME", help="a file or folder more in each source; repeatable"
    )
    return words
