"""Which rank the others of its group wait for, where the collectives are evidence enough to name one (K3).

Enters: matched collectives (`matching.matched`). Leaves: one plain dictionary a process group. Must not: name a rank
on a median alone, or from ranks' clocks; waiting is compared within one collective (docs/measuring.md, section 1).

In a collective that no rank may leave early, the last rank to arrive waits for nobody and its peers wait for it. So a
straggler is the rank that waits least. Chance makes every rank the last one now and then; the rule (docs/metrics.md)
therefore asks for all of these:

- at least `MIN_COLLECTIVES` collectives known on every rank of the group;
- one rank was the last in at least `LAST_SHARE` of them. Ranks that are even take turns: with two, 13 or more of 16
  fall to a given one with probability 0.011 (binomial, p = 1/2), and less with more ranks;
- the median wait of every other rank is larger than its own by `MARGIN_MS` and by `MARGIN_SHARE` of the median
  transfer, so that it matters. 0.2 ms is what handing a collective to gloo takes (docs/log.md, 20 to 195 us).

Two ranks that are late together hide each other from this rule: none is named then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd

from aorta.analysis.stats import number_or_none

MIN_COLLECTIVES: Final = 16
LAST_SHARE: Final = 0.8
MARGIN_MS: Final = 0.2
MARGIN_SHARE: Final = 0.1


def stragglers(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """One entry per process group of two ranks or more, by name: who is late, by how many milliseconds, or why nobody
    is named. Warm-up is left out (W21).

    `late_ms` is the median over the peers' median waits, less the rank's own: how much longer they wait for it in each
    collective.
    """
    used = rows[~rows["warmup"] & rows["members"].notna() & (rows["group_size"] > 1)]
    entries = []
    for _, part in used.groupby(["group", "members"], sort=True):
        first = part.iloc[0]
        waits = part.pivot(index="instance", columns="rank", values="wait_ms").dropna()
        transfer_ms = part.loc[part["instance"].isin(waits.index), "transfer_ms"].median()
        entries.append(
            {"group": str(first["group"]), "group_ranks": list(first["members"]), **_judge(waits, float(transfer_ms))}
        )
    return entries


def _judge(waits: pd.DataFrame, transfer_ms: float) -> dict[str, Any]:
    """Args: a row a collective and a column a rank, in milliseconds; the median transfer."""
    medians = waits.median()
    found: dict[str, Any] = {
        "collectives": len(waits),
        "wait_ms_median_per_rank": {str(rank): number_or_none(median) for rank, median in medians.items()},
        "rank": None,
        "late_ms": None,
        "last_share": None,
        "reason": None,
    }
    if len(waits) < MIN_COLLECTIVES:
        return found | {"reason": f"{len(waits)} collectives known on every rank, {MIN_COLLECTIVES} are needed"}
    ordered = medians.sort_values()
    rank, own = ordered.index[0], float(ordered.iloc[0])
    least = waits.min(axis=1)
    alone = waits.eq(least, axis=0).sum(axis=1) == 1  # where several are last, none is
    share = float(((waits[rank] == least) & alone).mean())
    margin, needed = float(ordered.iloc[1]) - own, max(MARGIN_MS, MARGIN_SHARE * transfer_ms)
    found["last_share"] = share
    if share < LAST_SHARE:
        return found | {"reason": f"rank {rank} waits least, but was the last in {share:.0%} of the collectives only"}
    if margin <= needed:
        return found | {"reason": f"rank {rank} is late by {margin:.3g} ms, not by more than {needed:.3g} ms"}
    return found | {"rank": int(rank), "late_ms": float(ordered.iloc[1:].median()) - own}


def sentences(entries: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader must see: one sentence a straggler, none where nobody is named."""
    return [
        f"rank {entry['rank']} is a straggler: the other ranks of group {entry['group']} wait for it, "
        f"{entry['late_ms']:.3f} ms longer than it does in each collective (median; it was the last in "
        f"{entry['last_share']:.0%} of {entry['collectives']})"
        for entry in entries
        if entry["rank"] is not None
    ]
