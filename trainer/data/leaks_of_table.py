"""The columns of a table that nobody has described yet, as `leaks.py` looks at them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from embertide._common.quoting import shown
from embertide.trainer.data.arrow import is_text, plain, split
from embertide.trainer.data.assemble import hash_strings
from embertide.trainer.data.base import MISSING_KEY, Positive
from embertide.trainer.data.columns import time_values
from embertide.trainer.data.guess import Asked, Choice, Guess
from embertide.trainer.data.leaks import (
    REMEDIES,
    ColumnNote,
    SampledColumn,
    examine,
    kept_rows,
    unique_note,
)

_OPTIONS = {
    "key": "--key-column",
    "number": "--number-column",
    "number and key": "--number-column",
    "list": "--list-column",
}


def table_notes(table: pa.Table, found: Guess, rows: int) -> list[ColumnNote]:
    """Return what is to be said of the columns of the first rows of an input.

    Args:
        table: Its columns have the types that their values have.
        found: The guess about the columns.
        rows: Rows of the whole input.
    """
    by_role = {each.role: each.facts.name for each in found.choices}
    there_N, label_N = labels_of(table.column(by_role["label"]), found.positive)
    there = np.flatnonzero(there_N)
    kept = there[kept_rows(label_N[there_N], there)]
    sampled = table.take(pa.array(kept))
    ts_ms_N = None
    if "time" in by_role:
        with np.errstate(over="ignore"):
            ts_ms_N = time_values(sampled.column(by_role["time"])) * found.unit_ms
        # Rows without a time come last; they are rejected.
        ts_ms_N = np.where(np.isnan(ts_ms_N), np.inf, ts_ms_N)
    columns = [
        column
        for each in found.choices
        if each.facts.name in table.column_names
        and (column := _sampled(sampled.column(each.facts.name), each, found)) is not None
    ]
    notes = examine(columns, label_N[kept], ts_ms_N)
    for each in found.choices:
        if each.role in ("key", "number and key"):
            in_all = round(rows * each.facts.present / max(1, each.facts.rows))
            note = unique_note(each.facts.name, min(each.facts.expected, in_all), in_all)
            notes += [] if note is None or each.role != "key" else [note]
    return notes


def without_leaks(
    found: Guess, notes: Sequence[ColumnNote], asked: Asked
) -> tuple[Guess, list[str]]:
    """Return a guess that leaves leaks out, and what to say of all notes.

    A column whose use a person has named stays in.
    """
    named = {*asked.keys, *asked.texts, *asked.lists, *asked.numbers}
    choices, said = {each.facts.name: each for each in found.choices}, []
    for note in notes:
        name = note.columns[0]
        choice = choices[name]
        if not note.is_leak or name in named:
            said.append(f"{note.text}; {REMEDIES[note.kind]}")
            continue
        if choice.role == "left out":
            said.append(f"{note.text}; it is left out")
            choices[name] = dataclasses.replace(choice, why=f"{choice.why}; {_reason(note)}")
            continue
        have = f"{_OPTIONS[choice.role]} {shown(name)}"
        said.append(f"{note.text}; it is left out, {have} has it all the same")
        why = f"{_reason(note)}; {have} has it all the same"
        choices[name] = dataclasses.replace(choice, role="left out", why=why)
    return dataclasses.replace(found, choices=tuple(choices.values())), said


def _reason(note: ColumnNote) -> str:
    if note.kind == "after the label" or note.auc is None:
        return "known only after the label"
    return f"it alone tells the label, AUC {note.auc:.4f}"


def labels_of(column: Any, positive: str) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which rows have a label, and whether it is 1.

    Args:
        column: The label's; its texts are numbers, unless `positive` names a text.
        positive: Which values are 1; empty: all but 0.
    """
    array = plain(column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column)
    if positive and Positive.of(positive).is_text:
        words = _words(array)
        there = pc.is_valid(words).to_numpy(zero_copy_only=False)
        text_N = np.asarray(pc.fill_null(words, b"").to_pylist(), np.object_)
        return there, Positive.of(positive).holds(text_N)
    value_N = time_values(array, "float")
    there_N = ~np.isnan(value_N)
    if not positive:
        return there_N, np.asarray(value_N != 0) & there_N
    return there_N, Positive.of(positive).holds(np.where(there_N, value_N, 0.0)) & there_N


def _sampled(column: Any, choice: Choice, found: Guess) -> SampledColumn | None:
    """Return a column by its role; None for what no model reads and no clock is."""
    facts, name = choice.facts, choice.facts.name
    array = plain(column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column)
    if choice.role == "list":
        if not facts.nested:
            array = plain(split(_words(array), facts.separator or "|"))
        sizes_N = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        return SampledColumn(
            name=name, items_M=_keys(array.flatten()), sizes_N=sizes_N.astype(np.int64)
        )
    if choice.role == "left out" and facts.kind == "time":
        return SampledColumn(name=name, value_N=time_values(array), unit_ms=1.0)
    unit_ms = facts.unit_ms if facts.unit else found.unit_ms
    if choice.role in ("number", "number and key"):
        return SampledColumn(name=name, value_N=time_values(array), unit_ms=unit_ms)
    if choice.role == "key" and facts.kind != "time":
        return SampledColumn(
            name=name, keys_N=_keys(array), unit_ms=unit_ms if facts.kind == "int" else 0.0
        )
    return None


def _words(array: Any) -> Any:
    """Return text as bytes; numbers, which a person may have called text, as they are printed."""
    if is_text(array.type):
        return array.cast(pa.large_binary())
    return array.cast(pa.large_string()).cast(pa.large_binary())


def _keys(array: Any) -> NDArray[np.int64]:
    """Return keys as readers make them."""
    if pa.types.is_floating(array.type) or pa.types.is_decimal(array.type):
        value_N = time_values(array)
        with np.errstate(invalid="ignore"):  # beyond 64 bits, which readers reject
            return np.where(np.isfinite(value_N), value_N, MISSING_KEY).astype(np.int64)
    if pa.types.is_integer(array.type) or pa.types.is_boolean(array.type):
        whole = array.cast(pa.int8()) if pa.types.is_boolean(array.type) else array
        filled: NDArray[Any] = pc.fill_null(whole, 0).to_numpy(zero_copy_only=False)
        null_N = array.is_null().to_numpy(zero_copy_only=False)
        return np.where(null_N, MISSING_KEY, filled.astype(np.int64))
    if not len(array) or pa.types.is_null(array.type):
        return np.full(len(array), MISSING_KEY, np.int64)
    words = pc.fill_null(array.cast(pa.large_binary()), b"").dictionary_encode()
    keys_U = hash_strings(np.asarray(words.dictionary.to_pylist(), np.object_))
    code_N: NDArray[Any] = words.indices.to_numpy(zero_copy_only=False)
    return np.asarray(keys_U[code_N])
