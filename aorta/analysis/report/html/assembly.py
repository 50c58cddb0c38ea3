"""The page as one file: template, styles with the palette of both themes, scripts and data, and the policy that lets
nothing else run.

The content security policy forbids every request, and every script but those whose hashes it names. A word of a record
that found its way into the page as markup could still do nothing. Must not load anything, in this process or in the
browser, or name a colour that `report.palette` does not have.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

from bokeh.document import Document
from bokeh.resources import Resources
from jinja2 import Environment, StrictUndefined

from aorta.analysis.formatting import json_text
from aorta.analysis.report.html.bokeh_chart import Chart
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


_ASSETS: Final = files("aorta.analysis.report.html") / "assets"
_SCRIPTS: Final = ("theme.js", "tables.js", "timeline.js", "timeline_labels.js", "timeline_detail.js", "start.js")
_TEMPLATE: Final = "page.html.jinja"


def assemble(context: Mapping[str, Any], charts: Sequence[Chart], data: Mapping[str, Any]) -> str:
    """Render the template."""
    scripts = [*_bokeh(), "\n".join(_asset(name) for name in _SCRIPTS)]
    page = {**data, "document": _document(charts), "roots": {chart.name: chart.model.id for chart in charts}}
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = json_text
    template = environment.from_string(_asset(_TEMPLATE))
    return template.render(
        **context,
        policy=policy(scripts),
        style=variables() + _asset("page.css"),
        scripts=scripts,
        data=json_for_script(page),
    )


def policy(scripts: Sequence[str]) -> str:
    """The content security policy of a page with these inline scripts."""
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


def json_for_script(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _bokeh() -> list[str]:
    """BokehJS without widgets, tables, MathJax and WebGL."""
    sources = Resources(mode="inline", components=["bokeh"]).js_raw
    return [source.replace("\r\n", "\n") for source in sources]


def _document(charts: Sequence[Chart]) -> Any:
    """The charts as the JSON of one document of Bokeh, so that they can share ranges."""
    document = Document()
    for chart in charts:
        document.add_root(chart.model)
    return document.to_json(deferred=False)


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
