"""Renders the calls and operators of all workers as one table, in the layout first described for RPC profiling in
torch.

Takes the calls as their callers saw them and the operators of every trace; gives rows by node and name, and text. Must
not: print a number that is not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aorta.analysis.formatting import TEXT
from aorta.analysis.rpc.rpc_rows import RemoteOperator
from aorta.records.rpc_files import Call

REMOTE_OP = "#remote_op: "
REMOTE_CALL = "#remote_call"
_HEADS = (
    "Name",
    "Self CPU total %",
    "Self CPU total",
    "CPU total %",
    "CPU total",
    "CPU time avg",
    "Number of Calls",
    "Node ID",
    "Node",
)


@dataclass
class CallRow:
    """One name on one node. The row of a call measures from issue to reply: its caller's CPU may do anything in that
    time, many calls may wait at once, and so it has no self time and no share of the CPU's time (`waits`).

    Bytes count what was allocated, not what was freed; None where no memory was measured.
    """

    name: str
    node: int
    self_ns: int = 0
    total_ns: int = 0
    count: int = 0
    unanswered: int = 0
    waits: bool = False
    allocated_bytes: int | None = None
    self_allocated_bytes: int | None = None

    def add_memory(self, allocated_bytes: int, self_allocated_bytes: int) -> None:
        """Add what one call allocated."""
        self.allocated_bytes = (self.allocated_bytes or 0) + allocated_bytes
        self.self_allocated_bytes = (self.self_allocated_bytes or 0) + self_allocated_bytes


def make_rows(calls: Iterable[Call], operators: Iterable[tuple[int, RemoteOperator]]) -> list[CallRow]:
    """Rows by node, then total time, longest first. Each of `operators` comes with the node it ran on."""
    rows: dict[tuple[int, str], CallRow] = {}

    def row(node: int, name: str) -> CallRow:
        return rows.setdefault((node, name), CallRow(name, node))

    for call in calls:
        mine = row(call.caller, call.name)
        mine.count += 1
        mine.waits = True
        if call.reply_ns is None:
            mine.unanswered += 1
        else:
            mine.total_ns += call.reply_ns - call.issue_ns
    for node, operator in operators:
        mine = row(node, shown_name(operator))
        mine.count += 1
        mine.waits |= operator.waits
        mine.self_ns += operator.self_ns
        mine.total_ns += operator.end_ns - operator.start_ns
        if operator.memory is not None:
            by_operators = sum(each.self_allocated_bytes for each in operator.memory.operators.values())
            mine.add_memory(operator.memory.allocated_bytes, operator.memory.allocated_bytes - by_operators)
            for name, figures in operator.memory.operators.items():
                inside = row(node, f"{operator.name}{REMOTE_OP}{name}")
                inside.add_memory(figures.allocated_bytes, figures.self_allocated_bytes)
    return sorted(rows.values(), key=lambda row: (row.node, -row.total_ns, row.name))


def shown_name(operator: RemoteOperator) -> str:
    """The name shown for a call's slice on its callee, for an operator that served a call, or for any
    other operator.
    """
    if operator.call_id is not None:
        return operator.name + REMOTE_CALL
    return f"{operator.serves}{REMOTE_OP}{operator.name}" if operator.serves else operator.name


def render(rows: list[CallRow], names: dict[int, str]) -> str:
    """The table as text. Percentages are of the self time of all rows of all nodes; a wait has none, nor what
    adds up to more (an operator inside one of its own name). There are columns of memory where any was measured.
    """
    whole = sum(row.self_ns for row in rows)
    memory = any(row.allocated_bytes is not None for row in rows)
    heads = (*_HEADS, "CPU Mem", "Self CPU Mem") if memory else _HEADS
    cells: list[tuple[str, ...]] = [heads]
    for row in rows:
        answered = row.count - row.unanswered
        line = (
            row.name,
            _share(row.self_ns, whole),
            _time(row.self_ns),
            "-" if row.waits or row.total_ns > whole else _share(row.total_ns, whole),
            _time(row.total_ns),
            _time(row.total_ns / answered) if answered else "-",
            f"{row.count}" + (f" ({row.unanswered} unanswered)" if row.unanswered else ""),
            str(row.node),
            names.get(row.node, "-"),
        )
        sizes = ["-" if size is None else TEXT.size(size) for size in (row.allocated_bytes, row.self_allocated_bytes)]
        cells.append((*line, *sizes) if memory else line)
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    lines = [
        "  ".join(_cell(text, width, column) for column, (text, width) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, f"Self CPU time total: {_time(whole)}"])


def _cell(text: str, width: int, column: int) -> str:
    return text.ljust(width) if column == 0 else text.rjust(width)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}%" if whole else "-"


def _time(ns: float) -> str:
    if ns >= 1e9:
        return f"{ns / 1e9:.3f}s"
    return f"{ns / 1e6:.3f}ms" if ns >= 1e6 else f"{ns / 1e3:.3f}us"
