"""A verdict as text of 80 columns: the answer, who is accused and why, who waits for whom, what every rank does, and
what to do next. Ranks that do the same share a line. Must not decide anything.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from aorta.autopsy.verdict import ENDED_IN_ORDER, Accusation, RankDoing, Verdict, WaitingRanks
from aorta.command_line import name_ranks, rounded_time
from aorta.terminal_style import LEAST_WIDTH, PLAIN, Style

_MOST_LINES: Final = 6
"""Of waits, and of ranks: more are counted, and in the JSON."""
_GOOD: Final = ("not_stuck", "slow")


def verdict_text(verdict: Verdict, style: Style = PLAIN, *, stacks: bool = False) -> str:
    """Return the text for the terminal.

    Args:
        stacks: show the stacks of each rank that left some, those of its main thread first.
    """
    word = verdict.kind.replace("_", " ")
    title = style.bold(word) if verdict.kind in _GOOD else style.error(word)
    lines = [title, *_wrapped(verdict.summary, "  ")]
    lines += _block("accused", [line for one in verdict.culprits for line in _accused(one)])
    lines += _block("waiting", _limited([_wrapped(waiting_sentence(one), "  ") for one in verdict.waits]))
    lines += _block("ranks", _limited(list(_doing(verdict.ranks))))
    if verdict.missing:
        lines += [f"  no evidence of {name_ranks(verdict.missing)}"]
    lines += _block("sources disagree", [line for one in verdict.contradictions for line in _wrapped(one, "  ")])
    lines += _block("limits", [line for one in verdict.notes for line in _wrapped(one, "  ")])
    lines += _block("next", [line for one in verdict.next for line in _wrapped(one, "  ")])
    if stacks:
        lines += _block("stacks", [line for one in verdict.ranks for line in _stacks(one)])
    return "\n".join(lines)


def _block(title: str, lines: Sequence[str]) -> list[str]:
    return [title, *lines] if lines else []


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, LEAST_WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")


def _limited(blocks: Sequence[list[str]]) -> list[str]:
    shown = [line for block in blocks[:_MOST_LINES] for line in block]
    return [*shown, f"  and {len(blocks) - _MOST_LINES} more; see --json"] if len(blocks) > _MOST_LINES else shown


def _accused(one: Accusation) -> Iterator[str]:
    aspect = f" of {one.aspect}" if one.aspect else ""
    yield from _wrapped(f"rank {one.rank}: {one.kind.replace('_', ' ')}{aspect} (rule {one.rule})", "  ")
    for line in one.evidence:
        yield from _wrapped(line, "    ")


def waiting_sentence(one: WaitingRanks) -> str:
    """Return who waits for whom, in which collective, and for how long."""
    for_whom = f" for {name_ranks(one.for_ranks)}" if one.for_ranks else ""
    verb = "waits" if len(one.ranks) == 1 else "wait"
    size = "" if one.collective.bytes is None else f" ({one.collective.bytes:,} bytes)"
    return f"{name_ranks(one.ranks)} {verb}{for_whom} in {one.collective}{size}{_age(one.since_s)}"


def _doing(ranks: Sequence[RankDoing]) -> Iterator[list[str]]:
    """Yield what ranks do, those that do the same in one line."""
    alike: dict[tuple[str, str, int | None], list[RankDoing]] = {}
    for one in ranks:
        alike.setdefault((one.doing, one.state, one.step), []).append(one)
    for (doing, state, step), several in alike.items():
        ages = [one.since_s for one in several if one.since_s is not None]
        # How a rank ended says more than that its process is gone.
        parts = [doing] if state in ("unknown", doing) or doing == ENDED_IN_ORDER else [state, doing]
        parts += [f"step {step}"] if step is not None else []
        who = name_ranks([one.rank for one in several])
        yield _wrapped(f"{who}: {', '.join(parts)}{_age(max(ages, default=None))}", "  ")


def _age(seconds: float | None) -> str:
    return f", for {rounded_time(seconds)}" if seconds is not None else ""


def _stacks(one: RankDoing) -> Iterator[str]:
    threads = [(f"rank {one.rank}", one.stack)] if one.stack else []
    threads += [(f"rank {one.rank}, thread {each.name}", list(each.frames)) for each in one.other_stacks]
    for title, frames in threads:
        yield f"  {title}"
        yield from (f"    {frame}" for frame in frames)
