"""The page of alerts, docs/alerts.md: what each means, what to look at first, what to do."""

import textwrap
from collections.abc import Iterator

from k8s.monitoring.rules import GROUPS, RECORDINGS, Alert

_WIDTH = 120
_HEAD = """\
# Alerts

<!-- Written by `make monitoring` from k8s/monitoring/rules.py. -->

The alerts of [Prometheus and Grafana](monitoring.md). **critical**: callers get errors or default
rows now. **warning**: they soon will, or answers grow old.
"""


def _wrapped(text: str, first: str = "", rest: str = "") -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".")


def _section(alert: Alert) -> Iterator[str]:
    yield f"### {alert.name}\n"
    lasts = "at once" if alert.lasts == "0s" else f"after {alert.lasts}"
    needs = f", needs {alert.needs}" if alert.needs else ""
    yield _wrapped(f"**{alert.severity}**, fires {lasts}{needs}. {alert.means}") + "\n"
    yield f"```text\n{alert.expression}\n```\n"
    for title, steps in (("Look first:", alert.look), ("What to do:", alert.act)):
        yield title + "\n"
        yield "\n".join(_wrapped(step, "* ", "  ") for step in steps) + "\n"


def page() -> str:
    """Return the page."""
    parts = [_HEAD, "## All alerts\n"]
    rows = [
        f"| [{alert.name}](#{alert.anchor}) | {alert.severity} | {_first_sentence(alert.means)} |"
        for group in GROUPS
        for alert in group.alerts
    ]
    parts.append("\n".join(["| alert | severity | when |", "|---|---|---|", *rows]) + "\n")
    for group in GROUPS:
        parts.append(f"## {group.title}\n")
        for alert in group.alerts:
            parts += _section(alert)
    parts.append("## Recorded series\n")
    rows = [f"| `{each.record}` | {each.about} |" for each in RECORDINGS]
    parts.append("\n".join(["| series | what it is |", "|---|---|", *rows]))
    return "\n".join(parts) + "\n"
