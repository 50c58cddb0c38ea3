"""How unevenly routers send tokens to experts, and which expert, on which ranks, gets too many.

Tokens of all steps after warm-up and of all ranks read are added up, whether or not they found room. An expert is named
where it is sent at least `HOT_TIMES` the mean of its block, and that mean is at least `MIN_TOKENS`: routing by chance
alone makes counts that differ by their square root or so. Must not name an expert on fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Final

from aorta.analysis.documents.dataset import DatasetEntry, ExpertBlock, Experts, HottestExpert
from aorta.analysis.formatting import whole_percent
from aorta.analysis.tables import ExpertLoad, Run

HOT_TIMES: Final = 2.0
MIN_TOKENS: Final = 100
"""Twice a mean of 100 is ten standard deviations of a Poisson count."""


def expert_entry(run: Run) -> Experts | None:
    """`experts` of a dataset in `summary.json`; None where no step tells of any.

    `blocks`: of each router the tokens sent to each expert, its busiest expert and how many times the mean that one was
    sent, and the share of tokens dropped. `hottest` is the block and the expert with the largest such number; `named`
    says whether the rule above holds for it, `reason` why not. `ranks`: those that compute it; null: every rank
    computes its own tokens.
    """
    loads = [tables.expert_load for tables in run.ranks.values() if tables.expert_load.tokens]
    blocks = [_block(name, loads) for name in dict.fromkeys(name for load in loads for name in load.tokens)]
    blocks = [block for block in blocks if block.mean_tokens > 0]
    if not blocks:
        return None
    worst = max(blocks, key=lambda block: block.times_mean or 0.0)
    parts = _expert_parts(run)
    count, times_mean = len(worst.tokens), worst.times_mean or 0.0
    owner = None if parts is None or count % parts else worst.expert // (count // parts)
    ranks = None if owner is None or parts is None else list(range(owner, run.source.world_size, parts))
    reason = None
    if times_mean < HOT_TIMES:
        reason = f"no expert is sent {HOT_TIMES:g} times the mean of its block"
    elif worst.mean_tokens < MIN_TOKENS:
        reason = f"{worst.mean_tokens:.3g} tokens an expert are few: {MIN_TOKENS} are needed"
    return Experts(
        rank_steps=sum(load.steps for load in loads),
        ranks_told=len(loads),
        blocks=blocks,
        hottest=HottestExpert(worst.block, worst.expert, worst.times_mean),
        named=reason is None,
        reason=reason,
        ranks=ranks,
    )


def _block(name: str, loads: list[ExpertLoad]) -> ExpertBlock:
    tokens = [sum(of) for of in zip_longest(*(load.tokens.get(name, []) for load in loads), fillvalue=0)]
    total, dropped = sum(tokens), sum(load.dropped.get(name, 0) for load in loads)
    mean = total / len(tokens) if tokens else 0.0
    busiest = max(range(len(tokens)), key=tokens.__getitem__, default=0)
    return ExpertBlock(
        name,
        tokens,
        mean,
        busiest,
        times_mean=tokens[busiest] / mean if mean > 0 else None,
        dropped_share=dropped / total if total > 0 else None,
    )


def _expert_parts(run: Run) -> int | None:
    """Into how many parts the experts of a layer are split; ranks that follow one another have the parts in order."""
    plan = (run.manifest or {}).get("plan")
    mesh = plan.get("mesh") if isinstance(plan, Mapping) else None
    parts = mesh.get("expert") if isinstance(mesh, Mapping) else None
    return parts if isinstance(parts, int) and parts > 0 else None


def expert_sentences(entry: DatasetEntry) -> list[str]:
    """The hot expert of a dataset's entry as a sentence; none where no expert is named."""
    found = entry.experts
    if not found or not found.named:
        return []
    hottest, ranks = found.hottest, found.ranks
    block = next(each for each in found.blocks if each.block == hottest.block)
    others = [each.block for each in found.blocks if each.expert == hottest.expert]
    where = f"rank {', '.join(map(str, ranks))}" if ranks is not None else "every rank, for its own tokens"
    dropped = whole_percent(block.dropped_share)
    told = f"{len(others)} of {len(found.blocks)} blocks send most to that number"
    return [
        f"expert {hottest.expert} of {hottest.block} is hot: it is sent {hottest.times_mean:.2g} times the "
        f"mean of its block, and {dropped} of the block's tokens find no room ({told}; computed by {where})"
    ]
