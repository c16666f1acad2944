"""The last thing that `init` does: the trainer's own reader opens what was written.

What it rejects is said with the first row and value of each kind, and the remedy.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from embertide._common.quoting import shown, terminal_text
from embertide.trainer.commands import run_file
from embertide.trainer.commands.inputs import check_model
from embertide.trainer.data.base import DeadLetters
from embertide.trainer.errors import ConfigurationError, DataError

ROWS = 500_000
"""Rows that are read, at most."""

_BATCH = 4096
_MAX_SAID = 5
_REMEDIES = (
    (
        r"(key|a key of list) (?P<name>.*) is not an integer",
        "--text-column {name} reads it as text",
    ),
    (
        r"dense (?P<name>.*) is (not a number|infinite)",
        "mend them, or leave it out: --ignore {name}",
    ),
    (r"label is .*", "--positive says which values are 1, --label names another column"),
    (r"ts is .*", "mend them, or say --no-time if the order of rows is that of the events"),
    (r"ts goes .*", "they come late: sort the rows, or raise max_lateness_s in the run's file"),
    (r"malformed line", "give each line as many fields as the header"),
    (r"list (?P<name>.*) has more .*", "raise max_keys in the run's file"),
    (r"a key of list (?P<name>.*) is missing", "leave it out of the list"),
)


@dataclass(slots=True, kw_only=True)
class _FirstLetters(DeadLetters):
    """Counts rejected rows, and keeps the first of each reason.

    Attributes:
        first: Event index and value, by reason.
    """

    first: dict[str, tuple[int, object]] = field(default_factory=dict)

    def add(self, event_R: Sequence[int], reason: str, value_R: Sequence[object]) -> None:
        """See `DeadLetters.add`."""
        if event_R and reason not in self.first:
            self.first[reason] = event_R[0], value_R[0]
        DeadLetters.add(self, event_R, reason, value_R)


def rejected(path: Path) -> list[str]:
    """Open a run's file and its events as `train` does; return what is to be said of them.

    Raises:
        ConfigurationError: It cannot be opened, or no row can be learned.
        TrainerError: Its events cannot be read now.
    """
    given = run_file.load(path)
    source = given.source
    assert source is not None, "init writes one"
    check_model(given.run.model, source)
    letters = _FirstLetters()
    source.dead_letters = letters
    learned = positives = 0
    for batch in source.batches(batch_size=_BATCH):
        learned += len(batch)
        positives += int(batch.label_B.sum())
        if learned + letters.count >= ROWS:
            break
    where = getattr(source, "path", "the input")
    notes = [_note(letters, reason, learned) for reason in _worst(letters)]
    if not learned:
        said = notes[0] if notes else "there is none"
        raise DataError(where, f"no row can be learned: {said}")
    if positives in (0, learned) and learned > 1:
        one = "1" if positives else "0"
        label = shown(source.schema.label)
        notes.append(
            f"every label is {one}: a model learns nothing of it; --label and --positive say what "
            f"{label} means"
        )
    return notes


def _worst(letters: DeadLetters) -> list[str]:
    by_count = sorted(letters.by_reason.items(), key=lambda each: -each[1])
    return [reason for reason, _ in by_count[:_MAX_SAID]]


def _note(letters: _FirstLetters, reason: str, learned: int) -> str:
    count = letters.by_reason[reason]
    event, value = letters.first[reason]
    rows = f"{count:,} of {learned + letters.count:,} rows"
    remedy = "embertide train --dead-letters FILE keeps them"
    for pattern, said in _REMEDIES:
        found = re.fullmatch(pattern, reason, re.DOTALL)
        if found:
            name = found.groupdict().get("name", "")
            remedy = said.format(name=shown(name) if name else "")
            break
    return (
        f"{rows} are rejected: {terminal_text(reason)}, first {shown(value, 60)} in row "
        f"{event + 1}; {remedy}"
    )


__all__ = ["ConfigurationError", "rejected"]
