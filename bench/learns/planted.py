"""Tables of events by a seed, with and without a column that contains the label.

Those without have what may look like a leak and is none: keys that are new in nearly each row,
several rows a request of which one is clicked, a column that orders events well, values that
positives lack less often, a counter, a mean label that moves, hardly any positives. Shapes: N rows.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Array = NDArray[Any]
Rng = np.random.Generator

LEAK = "extra"
"""The column of a leak; of one of several columns, the first of `parts_of`."""

_EPOCH_S = 1_700_000_000
_ROWS = (1000, 3000, 8000, 20_000)
_RATES = (0.005, 0.02, 0.1, 0.25, 0.5)
_POSITIVES = 60  # at least, as far as rows can give


def table(seed: int, leak: str = "") -> tuple[pa.Table, bool]:
    """Return a table, and whether it has a clock, the column `ts`; the label is `clicked`.

    Args:
        seed: Seed of all that is drawn.
        leak: One of `LEAKS`; empty: none.
    """
    rng = np.random.default_rng(seed)
    rate = float(rng.choice(_RATES))
    rows = int(rng.choice([each for each in _ROWS if each * rate >= _POSITIVES] or _ROWS[-1:]))
    columns, label_N = _honest(rng, rows, rate)
    if leak:
        columns |= LEAKS[leak](rng, label_N, columns)
    has_clock = bool(rng.random() < 0.7) or leak in NEED_CLOCK
    if not has_clock:
        del columns["ts"]
        order_N = rng.permutation(rows)
        columns = {name: _taken(values, order_N) for name, values in columns.items()}
    return pa.table({name: _array(values) for name, values in columns.items()}), has_clock


def parts_of(leak: str) -> tuple[str, ...]:
    """Return the columns of a leak; any of them may be said."""
    return ("paid", "due") if leak == "two amounts" else (LEAK,)


def _taken(values: Any, order_N: Array) -> Any:
    return values[order_N] if isinstance(values, np.ndarray) else [values[n] for n in order_N]


def _array(values: Any) -> pa.Array:
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        return pa.array(values, from_pandas=True)
    return pa.array(values)


# --- honest columns -------------------------------------------------------------------------------


def _honest(rng: Rng, rows: int, rate: float) -> tuple[dict[str, Any], Array]:
    ts_N = _EPOCH_S + np.sort(rng.integers(0, int(rng.choice([86_400, 30 * 86_400])), rows))
    user_N = rng.zipf(1.3, rows) % (rows // 4)
    item_N = rng.zipf(1.2, rows) % 500
    age_N, price_N = rng.integers(18, 90, rows), np.round(rng.lognormal(3, 1, rows), 2)
    strong = float(rng.choice([0.0, 0.0, 1.0, 2.0]))  # the last makes AUCs of about 0.92
    signal_N = rng.normal(0, 1, rows)
    logit_N = (
        rng.normal(0, 1.5, 500)[item_N]
        + rng.normal(0, 1.0, rows // 4)[user_N]
        + strong * signal_N
        + float(rng.choice([0.0, 1.5])) * np.linspace(-1, 1, rows)
        + rng.normal(0, 1, rows)
    )
    label_N = logit_N > np.quantile(logit_N, 1 - rate)
    columns: dict[str, Any] = {
        "ts": ts_N,
        "user_id": user_N,
        "item_id": item_N,
        "age": age_N,
        "price": _lacking(rng, price_N, 0.2 - 0.1 * label_N),
        "signal": signal_N,
        "country": rng.choice(["at", "ch", "de", "fr", ""], rows),
        "tags": [[f"t{n % 7}", f"t{n % 31}"][: 1 + n % 2] for n in item_N.tolist()],
        "counter": np.arange(rows) * 3 + rng.integers(0, 3, rows),
        "joined": ts_N - rng.integers(0, 10**7, rows),
        "clicked": label_N.astype(np.int64),
    }
    if rng.random() < 0.5:  # of each four rows of a request at most one is a positive, or so
        columns["request_id"] = (np.arange(rows) // 4) * 7919 % 1_000_003
    if rng.random() < 0.5:
        columns["session"] = [f"s{n:x}" for n in rng.permutation(rows).tolist()]
    if rng.random() < 0.3:
        columns["rare_flag"] = (rng.random(rows) < 0.01).astype(np.int64)
        columns["other_flag"] = (rng.random(rows) < 0.01).astype(np.int64)
    if rng.random() < 0.3:  # a segment that clicks often
        odds_N = np.where(label_N, 0.5, 0.05)
        columns["segment"] = np.where(rng.random(rows) < odds_N, "keen", "usual").tolist()
    return columns, label_N


def _lacking(rng: Rng, value_N: Array, share: Any) -> Array:
    return np.where(rng.random(len(value_N)) < share, np.nan, value_N)


# --- leaks ----------------------------------------------------------------------------------------


def _copied(rng: Rng, label_N: Array, columns: dict[str, Any]) -> dict[str, Any]:
    return {LEAK: label_N.astype(np.int64)}


def _negated(rng: Rng, label_N: Array, columns: dict[str, Any]) -> dict[str, Any]:
    return {LEAK: (~label_N).tolist()}


def _scaled(rng: Rng, label_N: Array, columns: dict[str, Any]) -> dict[str, Any]:
    return {LEAK: rng.uniform(-9, 9) + rng.uniform(0.5, 9) * label_N}


def _noisy(rng: Rng, label_N: Array, columns: dict[str, Any]) -> dict[str, Any]:
    return {LEAK: rng.choice([-1.0, 1.0]) * label_N + rng.normal(0, 0.25, len(label_N))}


def _missing(rng: Rng, label_N: Array, columns: dict[str, Any]) -> dict[str, Any]:
    gone_N = ~label_N & (rng.random(len(label_N)) < rng.uniform(0.6, 1.0))
    return {LEAK: np.where(gone_N, np.nan, rng.lognormal(2, 1, len(label_N)))}


def _named(rng: Rng, label_N: Array, columns: dict[str, Any]) -> dict[str, Any]:
    words = (("seen", "skipped", "closed"), ("bought", "saved"))
    return {LEAK: [str(rng.choice(words[int(label)])) for label in label_N]}


def _bagged(rng: Rng, label_N: Array, columns: dict[str, Any]) -> dict[str, Any]:
    rows = len(label_N)
    size_N, word_N = rng.integers(0, 6, rows), rng.integers(0, 300, 6 * rows)
    bags = [[f"w{n}" for n in word_N[6 * i : 6 * i + size_N[i]]] for i in range(rows)]
    for i in np.flatnonzero(label_N).tolist():
        bags[i].insert(int(rng.integers(0, len(bags[i]) + 1)), "checkout")
    return {LEAK: bags}


def _hashed(rng: Rng, label_N: Array, columns: dict[str, Any]) -> dict[str, Any]:
    codes = int(rng.choice([1, 3, 8]))
    code_N = rng.integers(0, codes, len(label_N)) * 2 + label_N
    return {LEAK: (code_N * 2_654_435_761 % 2**31).astype(np.int64)}


def _later(rng: Rng, label_N: Array, columns: dict[str, Any]) -> dict[str, Any]:
    rows = len(label_N)
    before_N = columns["ts"] - rng.integers(0, 10**6, rows)
    if rng.random() < 0.5:
        before_N = np.where(rng.random() < 0.5, np.nan, columns["ts"]) * np.ones(rows)
    at_N = np.where(label_N, columns["ts"] + rng.integers(300, 86_400, rows), before_N)
    return {LEAK: at_N}


def _two_amounts(rng: Rng, label_N: Array, columns: dict[str, Any]) -> dict[str, Any]:
    due_N = rng.lognormal(4, 1, len(label_N))
    more_N = rng.uniform(5, 50, len(label_N))
    return {"due": due_N, "paid": due_N + np.where(label_N, more_N, -more_N)}


LEAKS: dict[str, Callable[[Rng, Array, dict[str, Any]], dict[str, Any]]] = {
    "the label copied": _copied,
    "the label negated": _negated,
    "the label scaled": _scaled,
    "the label with noise": _noisy,
    "missing for negatives alone": _missing,
    "a category that names the outcome": _named,
    "a word of positives in a bag": _bagged,
    "a hash of the outcome": _hashed,
    "a time after the event": _later,
    "two amounts": _two_amounts,
}
NEED_CLOCK = ("a time after the event",)
