"""Rules of `profiling=...`, and what is worth a word before the run."""

from __future__ import annotations

from collections.abc import Iterator

from aorta.config.rules.bounds import at_least
from aorta.config.schema import Config, Profiling


def profiling_rules(profiling: Profiling) -> Iterator[str]:
    """One message per broken rule."""
    yield from at_least(
        0,
        {
            "profiling.wait": profiling.wait,
            "profiling.warmup": profiling.warmup,
            "profiling.repeat": profiling.repeat,
        },
    )
    yield from at_least(1, {"profiling.active": profiling.active})
    if "/" in profiling.trace_filename or not profiling.trace_filename.endswith((".json", ".json.gz")):
        yield f"profiling.trace_filename={profiling.trace_filename!r}: a file name ending in .json or .json.gz"
    if profiling.enabled and not (profiling.tensorboard or profiling.chrome_trace):
        yield "profiling.enabled=true: nothing would be written; set profiling.tensorboard or profiling.chrome_trace"


def profiling_notes(config: Config) -> Iterator[str]:
    """What will be kept is less than was asked for."""
    profiling, steps = config.profiling, config.training.max_steps
    cycle = profiling.wait + profiling.warmup + profiling.active
    if profiling.enabled and steps is not None and steps < cycle:
        yield (
            f"profiling: a cycle takes {cycle} steps (wait {profiling.wait} + warmup {profiling.warmup} + active "
            f"{profiling.active}) and training.max_steps={steps}: at most a partial window will be kept"
        )
