"""A.10: every message fits 80 columns and has a next step.

In the source: all texts that commands end with, by where they say what to do. In a terminal of 80
columns: commands that are refused, or whose peer is away, for real.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench import report
from bench.edges.message_rules import (
    Shown,
    has_next_step,
    in_a_terminal,
    messages,
    next_step,
    too_wide,
)

NOBODY = "127.0.0.1:1"
REFUSED: tuple[tuple[str, ...], ...] = (
    ("serve", "nowhere"),
    ("serve", "nowhere", "--kind", "rank"),
    ("serve", "nowhere", "--http-port", "99999"),
    ("serve", "nowhere", "--host", "127.0.0.1:8000"),
    ("serve", "nowhere", "--node", "[/b]"),
    ("control", "--state", "nowhere"),
    ("control", "--state", f"redis://{NOBODY}/0"),
    ("control", "--state", "redis://u:p@ss/w#rd@h/0"),
    ("control", "--tokens", "nowhere"),
    ("control", "--listen", "::1"),
    ("status", "--url", f"http://{NOBODY}/metrics"),
    ("status", "--control", NOBODY),
    ("status", "--bus", f"redis://{NOBODY}/0"),
    ("node", "list", "--control", NOBODY),
    ("plan", "show", "--control", NOBODY, "--token-file", "nowhere"),
    ("hot", "--control", "10.0.0.7:1", "--token-file", "/dev/null"),
    ("reshard", "--control", NOBODY),
    ("drift", "mode", "odd", "--control", NOBODY),
    ("snapshot", "show", "nowhere"),
    ("snapshot", "diff", "nowhere", "x"),
    ("explain", "item", "1", "--snapshot", "nowhere"),
    ("explain", "item", "1", "--node", NOBODY),
    ("context", "use", "nothing"),
    ("context", "add", "[/b]", "--control", "a:1"),
    ("context", "show"),
    ("init", "nowhere.csv"),
    ("train", "x", "--data", "nowhere.parquet"),
    ("train", "x", "--data", f"redis://{NOBODY}/0"),
    ("send-events", f"redis://{NOBODY}/0", "--demo"),
    ("import", "out"),
    ("import", "out", "--table", "item=nowhere"),
    ("eval", "nowhere", "--data", "x.parquet"),
    ("guard", "nowhere"),
    ("mirror", "nowhere", "x"),
    ("cache-sim", "nowhere.parquet"),
    ("stats",),
)


def _faults(shown: Shown) -> list[str]:
    text = " ".join(line.strip("│╭╮╰╯─ ") for line in shown.lines)
    found = [f"too wide: {line}" for line in too_wide(shown.lines)]
    if "Traceback" in text:
        found.append("a traceback")
    if shown.status not in (1, 2):
        found.append(f"exit status {shown.status}")
    if not (has_next_step(text.partition("error: ")[2] or text) or "--help" in text):
        found.append("no next step")
    return found


def run() -> Iterator[report.Row]:
    """Yield how many messages lack what they must have."""
    told = Counter(map(next_step, messages("server", "trainer", "library")))
    for where, name in (("text", "in its text"), ("class", "by its class"), ("help", "by --help")):
        yield report.measure(
            ("source", f"next step {name}", "messages"), [told[where]], better="higher", target=0
        )
    yield report.measure(
        ("source", "without a next step", "messages"),
        [told[""]],
        better="lower",
        target=0,
        claim="A.10",
    )
    faults: list[str] = []
    widest = 0
    with tempfile.TemporaryDirectory() as folder:
        for words in REFUSED:
            shown = in_a_terminal(*words, folder=Path(folder))
            faults += [f"{' '.join(words)}: {fault}" for fault in _faults(shown)]
            widest = max([widest, *(len(line) for line in shown.lines if " " in line.strip())])
    for fault in faults:
        print(fault)
    case = f"terminal, {len(REFUSED)} commands"
    yield report.measure((case, "widest line", "columns"), [widest], better="lower", target=80)
    yield report.measure(
        (case, "too wide, or no next step", "messages"),
        [len(faults)],
        better="lower",
        target=0,
        claim="A.10",
    )
