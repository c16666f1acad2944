"""Templates of pages: names in them are text whatever they hold, and figures read the same."""

import base64
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import markupsafe

from embertide._common.quoting import terminal_text, without_secrets
from embertide._common.terminal import age_text, time_text

_HERE = Path(__file__).parent
STATIC = _HERE / "static"
"""Style sheets and scripts, for a server of pages or to be put into one."""


class Tile(NamedTuple):
    """A figure with what it means.

    Attributes:
        title: Its name.
        value: As people read it.
        note: The text below it.
        tone: good, warn, bad or plain.
    """

    title: str
    value: str
    note: str
    tone: str = "plain"


def size_text(count: float) -> str:
    """Return bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def _shown(value: Any) -> Any:
    """Return what a page shows of a value: names are text, whatever they hold."""
    return (
        terminal_text(without_secrets(value))
        if isinstance(value, str) and not isinstance(value, markupsafe.Markup)
        else value
    )


def _inlined(name: str) -> markupsafe.Markup:
    """Return the text of a static file, for a style or script element of a page in one file."""
    return markupsafe.Markup((STATIC / name).read_text(encoding="utf-8"))


def _data_url(name: str) -> str:
    """Return a picture among the static files as a URL that holds it."""
    picture = base64.b64encode((STATIC / name).read_bytes()).decode()
    return f"data:image/svg+xml;base64,{picture}"


def environment(templates: Path) -> jinja2.Environment:
    """Return the environment of a folder of templates, which may import the shared ones."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader((templates, _HERE / "templates")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "age": age_text,
        "time": time_text,
        "number": lambda value: f"{value:,}",
        "size": size_text,
        "percent": lambda value: f"{value:.1%}",
    }
    made.globals |= {"inlined": _inlined, "data_url": _data_url}
    return made
