"""One spelling of each term: words that are out, with what to write, held over all that a user reads.

What a user reads: help texts, the strings that the terminal and the page are made of, README and the user's pages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.docs.pages import ROOT

OUT: Final = {
    r"matrix products?": "GEMMs",
    r"beside the blocks": "other",
    r"beside the model": "other",
    r"beside communication": "overlapped with communication",
    r"against alone": "vs. alone",
    r"stood waiting|stands? waiting": "was blocked",
    r"ask further": "more",
    r"were (one part|this|it)[a-z ]*? (alone )?free": "if X were free",
    r"per cent sure|, sure\b|not sure": "significant, not significant",
    r"work beside": "other work",
    r"behind init_process_group": "after init_process_group",
    r"what to bear in mind": "note",
    r"stand where a label does": "can be used in place of a label",
    r"all reduces?\b": "all-reduce",
    r"\blies? (beside|apart|far)\b|beside nothing": "overlaps, differs",
    r"\bwhatever they\b|take part in nothing|say nothing of": "(leave it out)",
    r"the difference may be that of|what the (test|launch|network)": "name the subject",
}
"""Pattern (case ignored) -> what to write."""
SPOKEN: Final = (
    *sorted((ROOT / "aorta").glob("*.py")),
    *(
        path
        for part in ("analysis", "experiments", "streams", "gpu_check", "rpc")
        for path in (ROOT / "aorta" / part).rglob("*.py")
    ),
)
PAGES: Final = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "aorta/report/page/assets").glob("*")),
)


def strings(path: Path) -> Iterator[str]:
    """The strings of a module that are no docstring and no statement of their own, f-strings with `{}`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (silent | inner):
            yield node.value


def test_a_word_that_is_out_is_nowhere_a_user_reads() -> None:
    texts = [(path, text) for path in SPOKEN for text in strings(path)]
    texts += [(path, " ".join(path.read_text(encoding="utf-8").split())) for path in PAGES]
    assert [
        f"{path.relative_to(ROOT)}: {text[max(0, hit.start() - 40) :][:90]}: write {instead}"
        for pattern, instead in OUT.items()
        for path, text in texts
        for hit in re.finditer(pattern, text, re.IGNORECASE)
    ] == []
