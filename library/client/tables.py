"""Columns by name: of a mapping, a pyarrow Table or RecordBatch, or a pandas DataFrame.

What goes in comes out: a call over a DataFrame gives a Series with its index, one over a Table an
Array, one over a mapping numpy. Neither pyarrow nor pandas is loaded unless the caller did.

Shapes: B samples, N keys of a column.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embertide._common.quoting import shown
from embertide.client.errors import InputError

_REMEDY = "keys are 64-bit integers, as the trainer got them"
_OF_TEXT = "; of a column of text send embertide.client.text_keys(values)"
MISSING_KEY = -1  # as the trainer reads that of a column of one key; of text: that of ""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """The keys of one feature.

    Attributes:
        keys_N: Those of all samples, one after the other.
        lengths_B: The number of keys of each sample; None: one.
        weights_N: The weight of each key; None: 1.
    """

    keys_N: NDArray[np.int64]
    lengths_B: NDArray[np.int32] | None = None
    weights_N: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.keys_N if self.lengths_B is None else self.lengths_B)

    def repeated(self, times: int) -> "Keys":
        """Return the keys of all samples, `times` over."""
        lengths_B = None if self.lengths_B is None else np.tile(self.lengths_B, times)
        weights_N = None if self.weights_N is None else np.tile(self.weights_N, times)
        return Keys(np.tile(self.keys_N, times), lengths_B, weights_N)


class Table(Protocol):
    """Columns by name, and how to give columns back in the same kind."""

    @property
    def names(self) -> list[str]:
        """Names of all columns."""

    @property
    def strict(self) -> bool:
        """Whether a column that the model does not know is a mistake."""

    def column(self, name: str) -> Any:
        """Return a column as its kind has it."""

    def scores(self, scores_B: NDArray[np.float32], name: str) -> Any:
        """Return scores in this kind, which may keep a name."""

    def embeddings(self, by_name: dict[str, Any]) -> Any:
        """Return embeddings in this kind: arrays [B, dim], lists of arrays [n, dim]."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Mapping:
    columns: Mapping[str, Any]
    strict: bool = True

    @property
    def names(self) -> list[str]:
        return list(self.columns)

    def column(self, name: str) -> Any:
        column = self.columns[name]
        return _of_series(column) if _is_series(column) else column

    def scores(self, scores_B: NDArray[np.float32], name: str) -> Any:
        return scores_B

    def embeddings(self, by_name: dict[str, Any]) -> Any:
        return by_name


@dataclasses.dataclass(frozen=True, slots=True)
class _Arrow:
    table: Any
    strict: bool = False

    @property
    def names(self) -> list[str]:
        return list(self.table.schema.names)

    def column(self, name: str) -> Any:
        _check_once(name, self.names)
        column = self.table.column(name)
        # A Table's column is of chunks.
        return column.combine_chunks() if hasattr(column, "combine_chunks") else column

    def scores(self, scores_B: NDArray[np.float32], name: str) -> Any:
        return sys.modules["pyarrow"].array(scores_B)

    def embeddings(self, by_name: dict[str, Any]) -> Any:
        pyarrow = sys.modules["pyarrow"]

        def fixed(rows: NDArray[np.float32]) -> Any:
            flat = pyarrow.array(np.ascontiguousarray(rows).reshape(-1))
            return pyarrow.FixedSizeListArray.from_arrays(flat, rows.shape[1])

        def nested(parts: list[NDArray[np.float32]]) -> Any:
            ends = np.cumsum([0, *map(len, parts)], dtype=np.int32)
            return pyarrow.ListArray.from_arrays(pyarrow.array(ends), fixed(np.concatenate(parts)))

        return pyarrow.table(
            {n: nested(a) if isinstance(a, list) else fixed(a) for n, a in by_name.items()}
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Pandas:
    frame: Any
    strict: bool = False

    @property
    def names(self) -> list[str]:
        return [str(name) for name in self.frame.columns]

    def column(self, name: str) -> Any:
        _check_once(name, self.names)
        return _of_series(self.frame.iloc[:, self.names.index(name)])

    def scores(self, scores_B: NDArray[np.float32], name: str) -> Any:
        return sys.modules["pandas"].Series(scores_B, index=self.frame.index, name=name)

    def embeddings(self, by_name: dict[str, Any]) -> Any:
        columns = {name: list(rows) for name, rows in by_name.items()}
        return sys.modules["pandas"].DataFrame(columns, index=self.frame.index)


def _check_once(name: str, names: Sequence[str]) -> None:
    """Refuse a column of a name that two have: nobody knows which one is meant."""
    if names.count(name) > 1:
        raise InputError(
            f"column {name!r} is there {names.count(name)} times; give it once, or rename one"
        )


def _is_series(column: Any) -> bool:
    kind = type(column)
    return kind.__module__.partition(".")[0] == "pandas" and kind.__name__ == "Series"


def _of_series(series: Any) -> Any:
    if series.dtype.kind == "O":
        return series.tolist()
    missing = series.isna().to_numpy()
    # Nullable integers are no numpy ones; floats have NaN of their own.
    if missing.any() and series.dtype.kind in "iub":
        return series.astype(object).where(~missing, None).tolist()
    return series.to_numpy()


def open_table(features: Any) -> Table:
    """Return columns by name.

    Raises:
        InputError: It is none of what is taken.
    """
    if isinstance(features, Mapping):
        return _Mapping(features)
    package = type(features).__module__.partition(".")[0]
    if package == "pyarrow" and hasattr(features, "schema"):
        return _Arrow(features)
    if package == "pandas" and hasattr(features, "columns"):
        return _Pandas(features)
    raise InputError(
        f"features are a {type(features).__name__}; give a mapping of columns by name, a pyarrow "
        "Table or RecordBatch, or a pandas DataFrame"
    )


def text_keys(values: Any) -> NDArray[np.int64]:
    """Return the keys, [N], that a column of text has in events: xxh3_64, read as signed.

    `values` are a sequence, a numpy array, a pandas Series, or an array of pyarrow.

    The trainer hashes a column of text so, whatever it holds: a column of numbers that was text in
    the events is text in requests. A missing text (None, NaN, NA) has the key of the empty one, as
    in events.

    Raises:
        InputError: A value is no text.
    """
    import xxhash  # of the extras `client` and `train`; other callers send integers

    if _is_series(values):
        values = _of_series(values)
    elif _is_arrow(values):
        values = values.to_pylist()
    if isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, np.ndarray)):
        raise InputError(f"{shown(values)} is no column of text; give a list of texts, or an array")
    texts: list[str] = []
    for row, value in enumerate(values):
        if not (isinstance(value, str) or _is_missing(value)):
            raise InputError(f"row {row}: {shown(value)} is no text; integers are keys as they are")
        texts.append(value if isinstance(value, str) else "")
    hashes = (xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) for text in texts)
    return np.fromiter(hashes, np.uint64, len(texts)).view(np.int64)


# --- one column -----------------------------------------------------------------------------------


def keys_of(what: str, column: Any, weights: Any = None, *, text: bool = False) -> Keys:
    """Return the keys of a column: one a sample, or lists of them; errors say of `what`.

    Where a sample has one key it may be missing (None, NaN), `MISSING_KEY` then, as in events.
    Floats that are whole numbers are keys, as pandas makes them of integers with blanks. Of a
    column that was `text` in events, texts are hashed as there, a missing one as an empty one.

    Raises:
        InputError: A value is no 64-bit integer, is missing in a list, or weights are not as many.
    """
    flat, lengths_B = _flat(what, column)
    if text:
        flat = _hashed(flat, lengths_B)
    keys_N = _integers(what, flat, lengths_B)
    if weights is None:
        return Keys(keys_N, lengths_B)
    given, of_B = _flat(f"weights of {what}", weights)
    weights_N = floats_of(f"weights of {what}", given)
    same = len(weights_N) == len(keys_N) and (of_B is None) == (lengths_B is None)
    if same and of_B is not None and lengths_B is not None:
        same = np.array_equal(of_B, lengths_B)
    if not same:
        raise InputError(f"{what}: its weights do not have the lengths of its keys; give one a key")
    if not np.isfinite(weights_N).all():
        bad = int(np.flatnonzero(~np.isfinite(weights_N))[0])
        raise InputError(f"{what}, {_row(bad, lengths_B)}: weight {weights_N[bad]} is not finite")
    return Keys(keys_N, lengths_B, weights_N)


def floats_of(what: str, column: Any) -> NDArray[np.float32]:
    """Return a column of numbers; missing ones are NaN.

    Raises:
        InputError: A value is no number.
    """
    if _is_arrow(column):
        column = column.to_numpy(zero_copy_only=False)
    try:
        numbers = np.asarray(column, np.float64)
    except (TypeError, ValueError):
        values = enumerate(column)
        row, bad = next((b for b in values if not _is_number(b[1])), (0, column))
        raise InputError(f"{what}, row {row}: {shown(bad)} is no number") from None
    if numbers.ndim != 1:
        raise InputError(f"{what} has shape {list(numbers.shape)}; give one number a sample")
    with np.errstate(over="ignore"):
        narrow = numbers.astype(np.float32)
    if (np.isinf(narrow)).any():
        row = int(np.flatnonzero(np.isinf(narrow))[0])
        raise InputError(f"{what}, row {row}: {numbers[row]} is no finite fp32")
    return narrow


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, np.number))


def _is_missing(value: Any) -> bool:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # pandas' own
        return True
    return isinstance(value, (float, np.floating)) and bool(np.isnan(value))


def _is_whole(value: Any) -> bool:
    # Beyond 2^53 a float may be another integer's than its own.
    return bool(abs(value) <= 1 << 53 and value == np.rint(value))


def _is_arrow(column: Any) -> bool:
    return type(column).__module__.partition(".")[0] == "pyarrow"


def _row(at: int, lengths_B: NDArray[np.int32] | None) -> str:
    """Say where the value `at` of all values stands."""
    if lengths_B is None:
        return f"row {at}"
    ends = np.cumsum(lengths_B)
    row = int(np.searchsorted(ends, at, side="right"))
    return f"row {row}, place {at - int(ends[row] - lengths_B[row])}"


def _flat(what: str, column: Any) -> tuple[Any, NDArray[np.int32] | None]:
    """Return the values of a column one after the other, and how many each row has."""
    if _is_arrow(column):
        return _flat_arrow(what, column)
    if isinstance(column, np.ndarray) and column.dtype != object:
        if column.ndim == 1:
            return column, None
        if column.ndim == 2:
            return column.reshape(-1), np.full(len(column), column.shape[1], np.int32)
        raise InputError(f"{what} has shape {list(column.shape)}; give [B], or [B, keys]")
    if isinstance(column, (str, bytes)) or not isinstance(column, (Sequence, np.ndarray)):
        raise InputError(f"{what} is a {type(column).__name__}; give a column of keys or of lists")
    nested = [isinstance(value, (Sequence, np.ndarray)) for value in column]
    if not any(nested) or isinstance(column[nested.index(True)], (str, bytes)):
        return column, None
    if not all(nested):
        row = nested.index(False)
        raise InputError(f"{what}, row {row}: {shown(column[row])} is no list, as other rows are")
    lengths_B = np.fromiter(map(len, column), np.int32, len(column))
    whole = all(isinstance(value, np.ndarray) for value in column)
    flat = np.concatenate(column) if whole else [key for row in column for key in row]
    return flat, lengths_B


def _flat_arrow(what: str, column: Any) -> tuple[Any, NDArray[np.int32] | None]:
    types = sys.modules["pyarrow"].types
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
    lengths_B = None
    if types.is_list(column.type) or types.is_large_list(column.type):
        _refuse_nulls(what, column, None)
        lengths_B = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int32)
        column = column.flatten()
    elif types.is_fixed_size_list(column.type):
        _refuse_nulls(what, column, None)
        lengths_B = np.full(len(column), column.type.list_size, np.int32)
        column = column.flatten()
    if lengths_B is None and column.null_count:
        return column.to_pylist(), None
    _refuse_nulls(what, column, lengths_B)
    return column.to_numpy(zero_copy_only=False), lengths_B


def _refuse_nulls(what: str, column: Any, lengths_B: NDArray[np.int32] | None) -> None:
    if column.null_count:
        at = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise InputError(f"{what}, {_row(at, lengths_B)} is missing; {_REMEDY}")


def _hashed(flat: Any, lengths_B: NDArray[np.int32] | None) -> Any:
    """Return the values of a column of text with the keys of those that are texts.

    Integers are keys that `text_keys` gave.
    """
    if isinstance(flat, np.ndarray) and flat.dtype.kind in "iu":
        return flat
    values = list(flat)
    alone = lengths_B is None
    at = [
        n for n, each in enumerate(values) if isinstance(each, str) or (alone and _is_missing(each))
    ]
    if not at:  # nothing to hash, and xxhash may not be installed
        return values
    for n, key in zip(at, text_keys([values[n] for n in at]).tolist(), strict=True):
        values[n] = key
    return values


def _integers(what: str, flat: Any, lengths_B: NDArray[np.int32] | None) -> NDArray[np.int64]:
    if isinstance(flat, np.ndarray) and flat.dtype.kind in "iu":
        array = flat
    else:
        values = list(flat)
        for at, value in enumerate(values):
            if _is_missing(value):
                if lengths_B is not None:
                    raise InputError(
                        f"{what}, {_row(at, lengths_B)} is missing: leave it out of the list"
                    )
                values[at] = MISSING_KEY
                continue
            if isinstance(value, (float, np.floating)) and _is_whole(value):
                values[at] = int(value)
                continue
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
                raise InputError(
                    f"{what}, {_row(at, lengths_B)}: {shown(value)} is no integer; {_REMEDY}"
                    f"{_OF_TEXT if isinstance(value, str) else ''}"
                )
            if not -(2**63) <= value < 2**64:
                raise InputError(
                    f"{what}, {_row(at, lengths_B)}: {shown(value)} does not fit 64 bits; {_REMEDY}"
                )
        array = np.array([int(v) - 2**64 if v >= 2**63 else int(v) for v in values], np.int64)
    # A key is 64 bits, whatever their sign.
    return array.view(np.int64) if array.dtype == np.uint64 else array.astype(np.int64, copy=False)
