"""Data sets of different kinds, made from a seed and written as people keep them.

A set is columns in the order of events, and what each column is, which only the peer is told. The
rules of defaults were chosen while looking at the sets that are not held out. Shapes: N rows.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

Array = NDArray[Any]
_EPOCH_S = 1_600_000_000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """The rows of a set in the order of events.

    Attributes:
        columns: As the file has them, by name, the label and the time included.
        label_N: 0 or 1.
        keys: Columns that name things.
        numbers: Columns that are amounts.
        lists: Columns of lists of keys.
        ts_ms_N: Times; None: the order of rows is time.
        order_N: The order of the rows in the file; None: that of events.
    """

    columns: Mapping[str, Any]
    label_N: Array
    keys: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    ts_ms_N: Array | None = None
    order_N: Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """One set.

    Attributes:
        name: The name of its rows and files.
        make: Makes so many rows.
        rows: The number of rows.
        format: The format of the file: csv, tsv or parquet.
        held_out: Whether no rule was chosen by it.
    """

    name: str
    make: Callable[[np.random.Generator, int], Made]
    rows: int
    format: str
    held_out: bool

    def made(self, *, share: float = 1.0) -> Made:
        """Return its rows, or a share of as many; the same each time."""
        seed = int.from_bytes(self.name.encode()[:7], "big")
        return self.make(np.random.default_rng(seed), max(1000, round(self.rows * share)))


def write(made: Made, path: Path) -> None:
    """Write the rows as the ending of `path` says."""
    table = pa.table({name: _column(values) for name, values in made.columns.items()})
    if made.order_N is not None:
        table = table.take(pa.array(made.order_N))
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    delimiter = "\t" if path.suffix == ".tsv" else ","
    options = pyarrow.csv.WriteOptions(delimiter=delimiter, quoting_style="needed")
    pyarrow.csv.write_csv(table, path, options)


def _column(values: Any) -> pa.Array:
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        return pa.array(values, from_pandas=True)  # NaN is written as nothing
    return pa.array(values)


# --- what sets are made of ------------------------------------------------------------------------


def _zipf(rng: np.random.Generator, keys: int, rows: int, s: float = 1.0) -> Array:
    """Draw keys by a power law; which key is popular has nothing to do with its number."""
    share = np.arange(1, keys + 1, dtype=np.float64) ** -s
    rank_N = np.searchsorted(np.cumsum(share / share.sum()), rng.random(rows))
    return np.asarray(rng.permutation(keys)[np.minimum(rank_N, keys - 1)])


def _born(rng: np.random.Generator, keys: int, rows: int, *, known: float = 0.4) -> Array:
    """Draw keys of which a share is there from the start and new ones come all along."""
    alive_N = np.maximum(1, keys * (known + (1 - known) * np.linspace(0, 1, rows))).astype(np.int64)
    new_N = alive_N - 1 - np.minimum(rng.geometric(20 / keys, rows), alive_N) % alive_N
    old_N = (alive_N * rng.random(rows) ** 3).astype(np.int64)
    return np.asarray(rng.permutation(keys)[np.where(rng.random(rows) < 0.4, new_N, old_N)])


def _effect(rng: np.random.Generator, key_N: Array, scale: float) -> Array:
    return np.asarray(rng.normal(0, scale, int(key_N.max()) + 1)[key_N])


def _latent(
    rng: np.random.Generator, a_N: Array, b_N: Array, *, dim: int, scale: float, drift: float = 0.0
) -> Array:
    """Return dot products of factors of both keys; the second one's move by `drift` to the end."""
    a = rng.normal(0, 1, (int(a_N.max()) + 1, dim))
    b, moved = rng.normal(0, 1, (2, int(b_N.max()) + 1, dim))
    share_N1 = np.linspace(0, 1, len(a_N))[:, None]
    b_Nd = b[b_N] + drift * share_N1 * moved[b_N]
    return np.asarray(scale * (a[a_N] * b_Nd).sum(1) / np.sqrt(dim))


def _cross(rng: np.random.Generator, a_N: Array, b_N: Array, scale: float) -> Array:
    table = rng.normal(0, scale, (int(a_N.max()) + 1, int(b_N.max()) + 1))
    return np.asarray(table[a_N, b_N])


def _labels(rng: np.random.Generator, logit_N: Array, rate: float) -> Array:
    """Draw labels of which a share of about `rate` is 1."""
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = (1 / (1 + np.exp(-np.clip(logit_N + middle, -40, 40)))).mean()
        low, high = (middle, high) if mean < rate else (low, middle)
    p_N = 1 / (1 + np.exp(-np.clip(logit_N + low, -40, 40)))
    return np.asarray(rng.random(len(logit_N)) < p_N, np.int64)


def _times(rng: np.random.Generator, rows: int, span_s: float) -> Array:
    """Return ascending times in milliseconds; more by day than by night."""
    share_N = np.sort(rng.random(rows))
    second_N = share_N * span_s
    wave_N = np.sin(2 * np.pi * second_N / 86_400) * 86_400 / 8
    ms_N = (_EPOCH_S + np.clip(second_N + wave_N, 0, None)) * 1000
    sorted_N: Array = np.sort(ms_N.astype(np.int64))
    return sorted_N


def _hidden(rng: np.random.Generator, value_N: Array, share: float) -> Array:
    """Return floats of which a share is missing."""
    return np.where(rng.random(len(value_N)) < share, np.nan, value_N)


def _named(key_N: Array, before: str, digits: int = 0) -> list[str]:
    return [f"{before}{key:0{digits}d}" for key in key_N.tolist()]


def _hex(key_N: Array) -> list[str]:
    """Return texts that look like hashes."""
    mixed_N = key_N.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return [f"{value:016x}"[:8] for value in mixed_N.tolist()]


def _lists(rng: np.random.Generator, keys: int, rows: int, most: int) -> list[list[int]]:
    length_N = rng.integers(0, most + 1, rows)
    flat = _zipf(rng, keys, int(length_N.sum()), 0.8)
    return [each.tolist() for each in np.split(flat, np.cumsum(length_N)[:-1])]


def _iso(ts_ms_N: Array, separator: str = " ") -> list[str]:
    texts = np.datetime_as_string(ts_ms_N.astype("datetime64[ms]"), unit="s")
    return [text.replace("T", separator) for text in texts.tolist()]


# --- the sets that rules were chosen on -----------------------------------------------------------


def _ads(rng: np.random.Generator, rows: int) -> Made:
    """Display ads: hashed categories, counts with heavy tails and gaps, seconds."""
    sizes = {"C1": 40_000, "C2": 3000, "C3": 9000, "C4": 12, "C5": 400, "C6": 60, "C7": 5000}
    key = {
        name: (_born(rng, size, rows) if size > 2000 else _zipf(rng, size, rows, 1.1))
        for name, size in sizes.items()
    }
    logit_N = sum(_effect(rng, key[name], 0.5) for name in ("C2", "C3", "C5", "C6"))
    logit_N = logit_N + _cross(rng, key["C4"], key["C6"], 0.6)
    logit_N = logit_N + _latent(rng, key["C2"], key["C5"], dim=6, scale=0.7)
    numbers = {}
    for d in range(6):
        raw_N = np.floor(np.exp(rng.normal(1 + 0.5 * d, 1.5, rows)) - 0.5)
        numbers[f"I{d + 1}"] = _hidden(rng, raw_N, (0.0, 0.4, 0.1, 0.7, 0.0, 0.2)[d])
        if d < 4:
            logit_N = logit_N + (-1) ** d * 0.35 * np.log1p(np.clip(raw_N, 0, None))
    logit_N = logit_N - 0.5 * np.isnan(numbers["I2"])
    label_N = _labels(rng, logit_N, 0.23)
    ts_ms_N = _times(rng, rows, 7 * 86_400)
    columns: dict[str, Any] = {"label": label_N, "ts": ts_ms_N // 1000, **numbers}
    columns |= {name: _hex(values) for name, values in key.items()}
    return Made(
        columns=columns,
        label_N=label_N,
        keys=tuple(key),
        numbers=tuple(numbers),
        ts_ms_N=ts_ms_N // 1000 * 1000,
    )


def _ratings(rng: np.random.Generator, rows: int) -> Made:
    """Ratings of three years, filed by user: a matrix of few numbers, taste that moves."""
    users, movies = max(100, rows // 60), max(100, rows // 25)
    user_N, movie_N = _born(rng, users, rows), _zipf(rng, movies, rows, 0.9)
    logit_N = _effect(rng, user_N, 0.8) + _effect(rng, movie_N, 0.8)
    logit_N = logit_N + _latent(rng, user_N, movie_N, dim=5, scale=0.9, drift=0.5)
    genre_of = [sorted({int(g) for g in rng.integers(0, 18, 3)}) for _ in range(movies)]
    rating_N = np.clip(np.rint(3.6 + 0.7 * logit_N + rng.normal(0, 0.8, rows)), 1, 5)
    ts_ms_N = _times(rng, rows, 1038 * 86_400) // 1000 * 1000
    genres = [[f"g{g}" for g in genre_of[movie]] for movie in movie_N.tolist()]
    columns = {
        "userId": user_N + 1,
        "movieId": movie_N * 7 + 1,
        "genres": ["|".join(each) for each in genres],
        "rating": rating_N.astype(np.int64),
        "timestamp": ts_ms_N // 1000,
    }
    return Made(
        columns=columns,
        label_N=(rating_N >= 4).astype(np.int64),
        keys=("userId", "movieId"),
        lists=("genres",),
        ts_ms_N=ts_ms_N,
        order_N=np.lexsort((ts_ms_N, user_N)),
    )


def _bank(rng: np.random.Generator, rows: int) -> Made:
    """A bank's calls: few categories, many amounts, nobody comes twice, no time."""
    key = {"job": 12, "marital": 3, "education": 4, "contact": 3, "month": 12, "poutcome": 4}
    keys = {name: _zipf(rng, size, rows, 0.6) for name, size in key.items()}
    age_N = np.clip(rng.normal(41, 11, rows), 18, 95).round()
    balance_N = np.rint(np.exp(rng.normal(6.5, 1.4, rows)) - 300)
    duration_N = np.rint(np.exp(rng.normal(5.2, 0.9, rows)))
    campaign_N = 1 + rng.geometric(0.4, rows)
    logit_N = sum(_effect(rng, values, 0.4) for values in keys.values())
    logit_N = logit_N + 1.1 * (np.log(duration_N + 1) - 5) + 0.004 * (age_N - 45) ** 2 / 3
    logit_N = logit_N + 0.25 * np.sign(balance_N) * np.log1p(abs(balance_N)) / 3
    logit_N = logit_N - 0.15 * campaign_N + _cross(rng, keys["month"], keys["poutcome"], 0.5)
    label_N = _labels(rng, logit_N, 0.12)
    columns: dict[str, Any] = {"age": age_N.astype(np.int64)}
    columns |= {name: _named(values, f"{name}_") for name, values in keys.items()}
    columns |= {
        "balance": balance_N.astype(np.int64),
        "duration": duration_N.astype(np.int64),
        "campaign": campaign_N,
        "index_rate": rng.normal(93, 0.6, rows).round(3),
        "y": np.where(label_N == 1, "yes", "no").tolist(),
    }
    return Made(
        columns=columns,
        label_N=label_N,
        keys=tuple(keys),
        numbers=("age", "balance", "duration", "campaign", "index_rate"),
    )


def _sessions(rng: np.random.Generator, rows: int) -> Made:
    """A shop: what a session looked at as a list, the item shown, bought or not; milliseconds."""
    items, groups = 6000, 40
    group_I = rng.integers(0, groups, items)
    shown_N = _born(rng, items, rows)
    lists = _lists(rng, items, rows, 8)
    # Half of the lists are of the group that is shown.
    members = [np.flatnonzero(group_I == g) for g in range(groups)]
    for n in np.flatnonzero(rng.random(rows) < 0.5).tolist():
        own = members[group_I[shown_N[n]]]
        lists[n] = [int(rng.choice(own)) if rng.random() < 0.6 else item for item in lists[n]]
    shared_N = np.array(
        [
            np.mean(group_I[each] == group) if each else 0.0
            for each, group in zip(lists, group_I[shown_N].tolist(), strict=True)
        ]
    )
    price_N = np.exp(rng.normal(3, 0.8, items))[shown_N].round(2)
    device_N = _zipf(rng, 3, rows)
    logit_N = 2.0 * shared_N + _effect(rng, shown_N, 0.8) - 0.5 * np.log(price_N)
    logit_N = logit_N + _cross(rng, device_N, group_I[shown_N], 0.3)
    label_N = _labels(rng, logit_N, 0.08)
    ts_ms_N = _times(rng, rows, 14 * 86_400)
    columns = {
        "session_id": np.arange(rows) // 3 + 10_000,
        "event_time": ts_ms_N,
        "last_items": lists,
        "item_id": shown_N,
        "category_id": group_I[shown_N],
        "price": price_N,
        "device": np.array(["phone", "desktop", "tablet"])[device_N].tolist(),
        "purchased": label_N.astype(bool),
    }
    return Made(
        columns=columns,
        label_N=label_N,
        keys=("item_id", "category_id", "device"),
        numbers=("price",),
        lists=("last_items",),
        ts_ms_N=ts_ms_N,
    )


def _fraud(rng: np.random.Generator, rows: int) -> Made:
    """Payments, 1 % of them fraud: long texts as keys, times as ISO 8601."""
    card_N, shop_N = _born(rng, rows // 8, rows), _zipf(rng, 4000, rows, 1.1)
    country_N, kind_N = _zipf(rng, 60, rows, 1.4), _zipf(rng, 25, rows, 0.7)
    amount_N = np.exp(rng.normal(3.2, 1.2, rows)).round(2)
    logit_N = _effect(rng, shop_N, 0.9) + _effect(rng, country_N, 0.7) + _effect(rng, kind_N, 0.6)
    logit_N = logit_N + 0.9 * np.log1p(amount_N) + _latent(rng, shop_N, country_N, dim=3, scale=0.5)
    logit_N = logit_N + _effect(rng, card_N, 0.7)
    label_N = _labels(rng, logit_N, 0.01)
    ts_ms_N = _times(rng, rows, 60 * 86_400) // 1000 * 1000
    columns = {
        "created_at": _iso(ts_ms_N, "T"),
        "card_hash": _hex(card_N),
        "merchant_name": _named(shop_N, "Merchant Trading Company No. "),
        "country": _named(country_N, "c"),
        "category": _named(kind_N, "kind-"),
        "amount": amount_N,
        "noise": rng.normal(0, 1, rows).round(4),
        "label": label_N,
    }
    return Made(
        columns=columns,
        label_N=label_N,
        keys=("card_hash", "merchant_name", "country", "category"),
        numbers=("amount", "noise"),
        ts_ms_N=ts_ms_N,
    )


def _small(rng: np.random.Generator, rows: int) -> Made:
    """Few rows: a newsletter's clicks."""
    user_N, story_N = _zipf(rng, 400, rows, 0.6), _zipf(rng, 150, rows, 0.8)
    slot_N, client_N = rng.integers(0, 6, rows), _zipf(rng, 5, rows)
    logit_N = _effect(rng, user_N, 0.7) + _effect(rng, story_N, 0.7) - 0.3 * slot_N
    logit_N = logit_N + _latent(rng, user_N, story_N, dim=2, scale=0.4)
    label_N = _labels(rng, logit_N, 0.3)
    ts_ms_N = _times(rng, rows, 90 * 86_400) // 1000 * 1000
    columns = {
        "user": user_N,
        "story": story_N,
        "slot": slot_N,
        "client": np.array(["mail", "web", "app", "tv", "other"])[client_N].tolist(),
        "timestamp": ts_ms_N // 1000,
        "clicked": label_N,
    }
    return Made(
        columns=columns,
        label_N=label_N,
        keys=("user", "story", "slot", "client"),
        ts_ms_N=ts_ms_N,
    )


# --- the sets that are held out -------------------------------------------------------------------


def _plays(rng: np.random.Generator, rows: int) -> Made:
    """Music: each play that was finished beside others that were skipped; milliseconds."""
    user_N, track_N = _born(rng, 5000, rows), _born(rng, 20_000, rows)
    artist_T = _zipf(rng, 2500, 20_000, 0.9)
    artist_N, source_N = artist_T[track_N], _zipf(rng, 8, rows, 0.8)
    tempo_N = _hidden(rng, rng.normal(118, 25, 20_000)[track_N].round(1), 0.05)
    logit_N = _latent(rng, user_N, artist_N, dim=8, scale=1.0, drift=0.3)
    logit_N = logit_N + _effect(rng, track_N, 0.6) + _effect(rng, user_N, 0.5)
    logit_N = logit_N + _effect(rng, source_N, 0.6)
    label_N = _labels(rng, logit_N, 0.4)
    ts_ms_N = _times(rng, rows, 30 * 86_400)
    columns = {
        "ts": ts_ms_N,
        "user_id": user_N,
        "track_id": track_N,
        "artist": _named(artist_N, "artist "),
        "source_tab": _named(source_N, "tab"),
        "tempo": tempo_N,
        "finish": label_N.astype(bool),
    }
    return Made(
        columns=columns,
        label_N=label_N,
        keys=("user_id", "track_id", "artist", "source_tab"),
        numbers=("tempo",),
        ts_ms_N=ts_ms_N,
    )


def _hotels(rng: np.random.Generator, rows: int) -> Made:
    """Hotels found by a search: a position, prices, stars, gaps; times as text."""
    hotel_N, place_N = _zipf(rng, 8000, rows, 0.7), _zipf(rng, 300, rows, 0.9)
    site_N, position_N = _zipf(rng, 30, rows, 1.2), rng.integers(1, 41, rows)
    stars_N = rng.integers(1, 6, 8000)[hotel_N]
    review_N = np.clip(rng.normal(3.9, 0.6, 8000), 1, 5)[hotel_N].round(1)
    price_N = np.exp(4.4 + 0.2 * stars_N + rng.normal(0, 0.4, rows)).round(2)
    logit_N = -0.05 * position_N - 0.9 * np.log(price_N) + 0.35 * stars_N + 0.4 * review_N
    logit_N = logit_N + _effect(rng, hotel_N, 0.6) + _effect(rng, place_N, 0.3)
    logit_N = logit_N + _cross(rng, site_N, stars_N, 0.3)
    label_N = _labels(rng, logit_N, 0.05)
    ts_ms_N = np.repeat(_times(rng, rows // 20 + 1, 200 * 86_400) // 1000 * 1000, 20)[:rows]
    columns = {
        "srch_id": np.arange(rows) // 20,
        "date_time": _iso(ts_ms_N),
        "site_id": site_N + 1,
        "srch_destination_id": place_N * 31 + 5,
        "prop_id": hotel_N + 1,
        "prop_starrating": stars_N,
        "prop_review_score": _hidden(rng, review_N, 0.1),
        "price_usd": price_N,
        "position": position_N,
        "click_bool": label_N,
    }
    return Made(
        columns=columns,
        label_N=label_N,
        keys=("site_id", "srch_destination_id", "prop_id", "prop_starrating", "position"),
        numbers=("prop_review_score", "price_usd", "position"),
        ts_ms_N=ts_ms_N,
    )


def _installs(rng: np.random.Generator, rows: int) -> Made:
    """Half a million ads of apps in a week: ids as numbers, microseconds."""
    sizes = {"ip": 60_000, "app": 500, "device": 800, "os": 200, "channel": 180, "site": 3000}
    key = {name: _zipf(rng, size, rows, 1.1) for name, size in sizes.items()}
    key["ip"], key["creative"] = _born(rng, 60_000, rows), _born(rng, 8000, rows)
    logit_N = _effect(rng, key["app"], 0.9) + _effect(rng, key["channel"], 0.6)
    logit_N = logit_N + _latent(rng, key["app"], key["channel"], dim=4, scale=0.7)
    logit_N = logit_N + _latent(rng, key["app"], key["site"], dim=4, scale=0.6, drift=0.8)
    logit_N = logit_N + _effect(rng, key["os"], 0.4) + _effect(rng, key["creative"], 0.5)
    label_N = _labels(rng, logit_N, 0.04)
    ts_ms_N = _times(rng, rows, 7 * 86_400)
    columns = {"click_time": ts_ms_N * 1000 + rng.integers(0, 1000, rows), **key}
    columns |= {"is_installed": label_N}
    columns["click_time"] = np.sort(columns["click_time"])
    return Made(columns=columns, label_N=label_N, keys=tuple(key), ts_ms_N=ts_ms_N)


def _churn(rng: np.random.Generator, rows: int) -> Made:
    """Customers of a telephone company: amounts that act together, labels of text, no time."""
    tenure_N, monthly_N = rng.integers(1, 73, rows), rng.normal(65, 28, rows).clip(18, 120).round(2)
    total_N = _hidden(rng, (tenure_N * monthly_N * rng.normal(1, 0.05, rows)).round(2), 0.01)
    plan_N, pay_N, net_N = rng.integers(0, 3, rows), _zipf(rng, 4, rows, 0.5), _zipf(rng, 3, rows)
    calls_N = rng.poisson(1.5, rows)
    usage = rng.normal(0, 1, (8, rows))
    logit_N = 0.03 * (monthly_N - 60) * (plan_N == 0) - 0.04 * tenure_N + 0.5 * (calls_N > 3)
    logit_N = logit_N + _cross(rng, plan_N, net_N, 0.6) + _effect(rng, pay_N, 0.4)
    logit_N = logit_N + 0.5 * usage[0] - 0.4 * usage[1] + 0.6 * usage[2] * (usage[3] > 0)
    label_N = _labels(rng, logit_N, 0.26)
    columns = {
        "customerID": _hex(np.arange(rows)),
        "Contract": np.array(["Month-to-month", "One year", "Two year"])[plan_N].tolist(),
        "PaymentMethod": _named(pay_N, "method "),
        "InternetService": np.array(["DSL", "Fiber", "No"])[net_N].tolist(),
        "tenure": tenure_N,
        "MonthlyCharges": monthly_N,
        "TotalCharges": total_N,
        "service_calls": calls_N,
        **{f"usage_{d}": values.round(4) for d, values in enumerate(usage)},
        "Churn": np.where(label_N == 1, "Yes", "No").tolist(),
    }
    return Made(
        columns=columns,
        label_N=label_N,
        keys=("Contract", "PaymentMethod", "InternetService"),
        numbers=(
            *("tenure", "MonthlyCharges", "TotalCharges", "service_calls"),
            *(f"usage_{d}" for d in range(8)),
        ),
    )


def _jobs(rng: np.random.Generator, rows: int) -> Made:
    """Letters to candidates: their skills and the job's as text, dates without an hour."""
    skills, people, jobs = 300, 3000, 1500
    skill_S = rng.normal(0, 1, (skills, 4)) / 2
    of_person = [rng.choice(skills, rng.integers(2, 7), replace=False) for _ in range(people)]
    of_job = [rng.choice(skills, rng.integers(2, 6), replace=False) for _ in range(jobs)]
    person_N, job_N = _born(rng, people, rows), _born(rng, jobs, rows)
    mine = np.array([skill_S[each].mean(0) for each in of_person])[person_N]
    asked = np.array([skill_S[each].mean(0) for each in of_job])[job_N]
    level_N = rng.integers(0, 5, jobs)[job_N]
    logit_N = 3.0 * (mine * asked).sum(1) * 2 + _effect(rng, person_N, 0.6)
    logit_N = logit_N + _effect(rng, job_N, 0.5) - 0.2 * level_N
    label_N = _labels(rng, logit_N, 0.15)
    ts_ms_N = _times(rng, rows, 300 * 86_400) // 86_400_000 * 86_400_000
    person = [";".join(f"s{s}" for s in each) for each in of_person]
    job = [";".join(f"s{s}" for s in each) for each in of_job]
    columns = {
        "date": np.datetime_as_string(ts_ms_N.astype("datetime64[ms]"), unit="D").tolist(),
        "candidate": _named(person_N, "p", 5),
        "skills": [person[p] for p in person_N.tolist()],
        "job": _named(job_N, "j", 4),
        "requirements": [job[j] for j in job_N.tolist()],
        "level": level_N,
        "response": np.where(label_N == 1, "Y", "N").tolist(),
    }
    return Made(
        columns=columns,
        label_N=label_N,
        keys=("candidate", "job", "level"),
        lists=("skills", "requirements"),
        ts_ms_N=ts_ms_N,
    )


def _machines(rng: np.random.Generator, rows: int) -> Made:
    """Machines that fail: many sensors, of which most say nothing; timestamps of Parquet."""
    machine_N, kind_N = rng.integers(0, 250, rows), rng.integers(0, 6, rows)
    sensor = rng.normal(0, 1, (14, rows))
    sensor[3] = np.exp(sensor[3] * 1.5)
    sensor[5] = 20 * sensor[5] + 400
    logit_N = _effect(rng, machine_N, 0.8) + 0.8 * sensor[0] + 0.7 * np.log(sensor[3])
    logit_N = logit_N + 0.03 * (sensor[5] - 400) * (kind_N < 3) + 0.7 * sensor[6] ** 2
    label_N = _labels(rng, logit_N, 0.03)
    ts_ms_N = _times(rng, rows, 120 * 86_400)
    columns = {
        "when": ts_ms_N.astype("datetime64[ms]").astype("datetime64[us]"),
        "machine_id": _named(machine_N, "M-", 4),
        "kind": _named(kind_N, "kind"),
        **{f"s{d:02d}": values for d, values in enumerate(sensor)},
        "failed": label_N.astype(bool),
    }
    return Made(
        columns=columns,
        label_N=label_N,
        keys=("machine_id", "kind"),
        numbers=tuple(f"s{d:02d}" for d in range(14)),
        ts_ms_N=ts_ms_N,
    )


SETS = (
    Dataset(name="ads", make=_ads, rows=120_000, format="tsv", held_out=False),
    Dataset(name="ratings", make=_ratings, rows=100_000, format="parquet", held_out=False),
    Dataset(name="bank", make=_bank, rows=20_000, format="csv", held_out=False),
    Dataset(name="sessions", make=_sessions, rows=80_000, format="parquet", held_out=False),
    Dataset(name="fraud", make=_fraud, rows=200_000, format="csv", held_out=False),
    Dataset(name="small", make=_small, rows=5000, format="csv", held_out=False),
    Dataset(name="plays", make=_plays, rows=150_000, format="parquet", held_out=True),
    Dataset(name="hotels", make=_hotels, rows=120_000, format="csv", held_out=True),
    Dataset(name="installs", make=_installs, rows=500_000, format="parquet", held_out=True),
    Dataset(name="churn", make=_churn, rows=10_000, format="csv", held_out=True),
    Dataset(name="jobs", make=_jobs, rows=60_000, format="csv", held_out=True),
    Dataset(name="machines", make=_machines, rows=40_000, format="parquet", held_out=True),
)
"""Half of them are held out."""
