"""Checks before a loop is profiled, on all ranks or none: the settings, the folder, the destinations of uploads.

Must not leave anything behind where a check fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from aorta.config.groups.profiling import Profiling, profiling_rules, selected_ranks
from aorta.distributed.peers import Peers
from aorta.errors import ConfigError, FolderNotEmpty
from aorta.profiling.destinations import Destination, destination
from aorta.profiling.trace_names import TracePlace


def agree(peers: Peers, check: Callable[[], None]) -> None:
    """Run this rank's check; collective.

    Raises:
        ConfigError: on every rank, when the check of any rank raised it; names the rank.
    """
    answer: list[str] | None = None
    try:
        check()
    except ConfigError as error:
        answer = [type(error).__name__, str(error)]
    except (
        OSError,
        ValueError,
    ) as error:  # a folder that cannot be looked into: the others must not wait for this rank
        answer = [ConfigError.__name__, f"{type(error).__name__}: {error}"]
    answers = peers.gather("profiling", answer)
    failed = {rank: found for rank, found in enumerate(answers) if found}
    if failed:
        kind = FolderNotEmpty if FolderNotEmpty.__name__ in {name for name, _ in failed.values()} else ConfigError
        said: dict[str, list[int]] = {}
        for rank, (_, text) in failed.items():
            said.setdefault(text, []).append(rank)
        raise kind("; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in said.items()))


def refuse_broken(settings: Profiling, world_size: int) -> None:
    """Check the rules of the group.

    Raises:
        ConfigError: lists the broken ones.
    """
    if broken := list(profiling_rules(settings, world_size)):
        raise ConfigError("; ".join(broken))


def checked_destinations(settings: Profiling, place: TracePlace) -> tuple[Destination | None, Destination | None]:
    """Where this rank uploads traces, and memory pages; None where it does not.

    Raises:
        ConfigError: nothing can be written there.
    """
    selected = selected_ranks(settings.ranks)
    if selected is not None and place.rank not in selected:
        return None, None
    root, known = settings.remote_root, place.variables()
    of_traces = destination(root, settings.remote_file_name, known, overwrite=settings.overwrite)
    of_memory = None
    if settings.memory_filename is not None:
        of_memory = destination(root, settings.memory_remote_file_name, known, overwrite=settings.overwrite)
    addresses = {to.remote.address: to for to in (of_traces, of_memory) if to}
    for to in addresses.values():
        to.remote.check(f"rank{place.rank}")
    return of_traces, of_memory


def must_be_empty(folder: Path) -> None:
    """Check that a folder is empty; hidden files and folders do not count, and a missing folder is empty.

    Raises:
        FolderNotEmpty: names the folder and a file in it.
    """
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        inside = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in inside.parts):
            raise FolderNotEmpty(
                f"FileExistsError: {folder} is not empty; {inside} exists. Set profiling.overwrite=true, choose "
                "another profiling.folder, or label the run; in a loop of your own: overwrite=True, folder=... or "
                "run_name=..."
            )
