"""The tables of `docs/workloads.md` from the code and what tests train: `python -m tests.workload_table` renews them.

A combination that the configuration takes and no test trains is an error, and so is one that a test trains and the
configuration refuses; reasons are those that a user would read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from aorta.config.resolve import resolve
from aorta.config.schema import GROUPS
from aorta.config.workload import SIZES, Dimensions
from aorta.errors import ConfigError
from tests.composed import composed
from tests.trained_ways import DECODERS, PIPELINES, RANKS

TRAINED: Final[dict[str, set[str]]] = {
    "ranking": {"none", "ddp", "fsdp1", "fsdp", "hsdp", "tp", "fsdp_tp", *PIPELINES},
    "resnet18": {"none", "ddp"},
    "gpt": {*PIPELINES} | {way.strategy for way in DECODERS if way.workload == "gpt"},
    "moe": {way.strategy for way in DECODERS if way.workload == "moe"},
}
"""Workload -> the strategies on which tests train it: `recording/test_every_strategy.py`, `recording/test_resnet18.py`,
`recording/test_decoders.py`, `recording/test_pipeline.py`."""
NOT_TRAINED: Final = ("rpc", "streams")
"""Workloads that train nothing."""
PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "workloads.md"
_TABLES: Final = re.compile(r"(?ms)^\| (?:workload|`workload\.size`) \|.*?(?=\n## )")
"""From the first line of each table to the next heading."""


def parameters_of_feed_forward(dims: Dimensions) -> int:
    """The parameters of SwiGLU's three matrices."""
    return 3 * dims.model_dim * dims.mlp_hidden_dim


def parameter_count(dims: Dimensions) -> int:
    """The whole decoder's parameters: queries and output are square, keys and values have a share of the heads; two
    norms a layer and one at the end; embedding and head are not tied; no biases.
    """
    attention = 2 * dims.model_dim**2 + 2 * dims.model_dim * dims.num_kv_heads * dims.head_dim
    layer = attention + parameters_of_feed_forward(dims) + 2 * dims.model_dim
    return dims.num_layers * layer + dims.model_dim + 2 * dims.vocab_size * dims.model_dim


def cells(workloads: Iterable[str] = GROUPS["workload"]) -> dict[str, dict[str, str | int]]:
    """Workload -> strategy -> the ranks on which tests train it, or why it is refused.

    Raises:
        ValueError: a combination that is taken and not trained, or trained and not taken.
    """
    table: dict[str, dict[str, str | int]] = defaultdict(dict)
    for workload in workloads:
        for strategy in GROUPS["parallel"] if workload not in NOT_TRAINED else ():
            why = refusal(workload, strategy)
            if (why is None) != (strategy in TRAINED.get(workload, ())):
                wrong = "it is taken, but no test trains it" if why is None else f"a test trains it, but: {why}"
                raise ValueError(f"workload={workload} parallel={strategy}: {wrong}")
            table[workload][strategy] = RANKS[strategy] if why is None else why
    return table


def refusal(workload: str, strategy: str) -> str | None:
    """What the configuration says against a combination; None: nothing."""
    try:
        resolve(composed(f"workload={workload}", f"parallel={strategy}"), RANKS.get(strategy, 2))
    except ConfigError as error:
        return "; ".join(line.strip() for line in str(error).splitlines()[1:])
    return None


def updated(page: str) -> str:
    """The page with its tables as they are now."""
    table = cells()
    rows = [["workload", *(f"`{strategy}`" for strategy in next(iter(table.values())))]]
    for workload, row in table.items():
        rows.append([f"`{workload}`", *(str(cell) if isinstance(cell, int) else "no" for cell in row.values())])
    sizes = [["`workload.size`", "parameters", "layers", "width", "heads", "of keys", "feed-forward", "vocabulary"]]
    for name, dims in SIZES.items():
        sizes.append([f"`{name}`", f"{parameter_count(dims):,}", *(f"{each:,}" for each in dims)])
    made = iter(([*markdown(rows), "", *reasons(table)], [*markdown(sizes)]))
    return _TABLES.sub(lambda _old: "\n".join(next(made)) + "\n", page)


def reasons(table: dict[str, dict[str, str | int]]) -> Iterator[str]:
    """Each first reason once, with the combinations that have it; the message itself says what to use instead."""
    said: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for workload, row in table.items():
        for strategy, cell in row.items():
            if isinstance(cell, str):
                why = cell.partition(": ")[2].partition("; ")[0].removeprefix(f"workload={workload} ")
                said[why][workload].append(f"`{strategy}`")
    for why, where in said.items():
        combinations = [f"`{workload}` with {', '.join(names)}" for workload, names in where.items()]
        yield f"- {'; '.join(combinations)}: {why}"


def markdown(rows: list[list[str]]) -> Iterator[str]:
    """A table whose first row is the head."""
    for number, row in enumerate(rows):
        yield f"| {' | '.join(row)} |"
        if not number:
            yield "|---" * len(row) + "|"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
