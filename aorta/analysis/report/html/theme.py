"""The palette as the page's styles and scripts get it: CSS variables of both themes, and which light colour becomes
which dark one.

Must not name a colour that `report.palette` does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aorta.analysis.report.palette import MEANINGS, SURFACES, text_on


def variables() -> str:
    """`--forward`, `--ink`, ... for the light theme, the dark one, and a system that asks for dark."""
    light, dark = (_block(place, scheme) for place, scheme in enumerate(("light", "dark")))
    return (
        f":root {{ {light} }}\n"
        f':root[data-theme="dark"] {{ {dark} }}\n'
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme]) {{ {dark} }} }}\n"
    )


def _block(place: int, scheme: str) -> str:
    shades = {**SURFACES, **MEANINGS}
    return f"color-scheme: {scheme}; " + " ".join(f"--{name}: {shade[place]};" for name, shade in shades.items())


def for_scripts() -> dict[str, Mapping[str, Any]]:
    """`dark`: what a light colour of a chart becomes; `textOn`: black or white, for a label on a colour."""
    drawn = [*MEANINGS.values(), *(SURFACES[name] for name in ("page", "ink", "quiet", "grid", "band"))]
    return {
        "dark": {shade.light.lower(): shade.dark for shade in drawn},
        "textOn": {color: text_on(color) for shade in MEANINGS.values() for color in shade},
    }
