"""A seeded news portal that drifts, with the true click probabilities known.

Each hour brings new items and ages the old ones, so a model that is not kept fresh loses its
ground. An hour is a function of (seed, hour) alone, so a reader can start anywhere. The columns
are those of `news_schema`. Array suffixes: E events of an hour, V page views of an hour, I items
alive in an hour, U users, K topics, N items born in an hour, H hours.

An item is born with topics and a quality. How often it is shown falls by half every
`half_life_hours`, and it leaves after `lifetime_hours`. A page view shows `GROUP` items to one
user at one ts, and each is clicked independently with

    p = sigmoid(base + quality - fade * age + taste(user) . topics + similarity(prev) . topics
                + effects of device and hour of day)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embertide.trainer.data.assemble import Chunk, ChunkedSource, Column, Ints
from embertide.trainer.data.base import news_schema

GROUP = 4
"""Impressions of a page view; they share ts."""

HOUR_S = 3600
# Tags that keep the random streams of one seed apart.
_USERS, _ITEMS, _VIEWS = range(3)
_SMALL = {"env": 3, "device": 5, "os": 8, "country": 11, "region": 28, "referrer": 7}

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewsConfig:
    """Size and strength of the drift.

    The strengths are chosen for a ceiling AUC near 0.89 and a click rate near a quarter.

    Attributes:
        seed: Everything follows from it.
        hours: Length of the stream.
        views_per_hour: Page views in a mean hour; day and night differ by `day_swing`.
        day_swing: Relative amplitude of the daily curve, 0 to below 1.
        users: Number of users; their tastes are constant.
        new_items_per_hour: Items born every hour.
        lifetime_hours: Hours in which an item is shown.
        half_life_hours: Hours in which an item's share of the impressions halves.
        topics: Number of topics.
        quality: Standard deviation of item quality, in log-odds.
        fade: Log-odds that an item loses an hour.
        taste: Strength of user by topic, in log-odds.
        similarity: Strength of the match of the article being read and the one shown.
        base: Log-odds of a mean new item for a mean user.
        swap_hour: From this hour on, popular users and items have the ids of unpopular ones, and
            these theirs; what happens, and how likely, is as it would be without. 0: never.
    """

    seed: int = 1
    hours: int = 48
    views_per_hour: int = 2_500
    day_swing: float = 0.4
    users: int = 60_000
    new_items_per_hour: int = 60
    lifetime_hours: int = 24
    half_life_hours: float = 4.0
    topics: int = 8
    quality: float = 2.0
    fade: float = 0.15
    taste: float = 1.2
    similarity: float = 1.5
    base: float = -2.2
    swap_hour: int = 0

    def __post_init__(self) -> None:
        """Refuses sizes that make no stream."""
        counts = ("hours", "views_per_hour", "users", "new_items_per_hour", "lifetime_hours")
        for name in (*counts, "topics"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is below 1; give a positive one")
        for name in ("seed", "swap_hour"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} is negative; give 0 or more")
        if not 0 <= self.day_swing < 1:
            raise ValueError(f"day_swing {self.day_swing} is not in [0, 1); give 0 for none")
        if self.half_life_hours <= 0:
            raise ValueError(f"half_life_hours {self.half_life_hours} is not positive; give hours")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hour:
    """The events of one hour: columns by name and the true probabilities."""

    columns: dict[str, Ints]
    p_E: Floats


class NewsSource(ChunkedSource):
    """An `EventSource` that makes up its events; no two hours depend on one another."""

    def __init__(self, config: NewsConfig | None = None) -> None:
        """Draws the users; hours are drawn as they are read."""
        self.config = config = config or NewsConfig()
        super().__init__(f"news(seed={config.seed})", news_schema(), None)
        hour_H = np.arange(config.hours)
        # The night's low is at 4 o'clock.
        curve_H = 1 - config.day_swing * np.cos((hour_H % 24 - 4) * (2 * np.pi / 24))
        self._views_H = np.maximum(1, np.rint(config.views_per_hour * curve_H)).astype(np.int64)
        self._offset_H = GROUP * np.append(0, np.cumsum(self._views_H))
        rng = self._rng(_USERS, 0)
        taste_UK = rng.standard_normal((config.users, config.topics))
        self._taste_UK = taste_UK - taste_UK.mean(axis=1, keepdims=True)
        self._attribute_U = {
            name: _skewed(rng, size, config.users) for name, size in _SMALL.items()
        }
        # Users come with very different zeal: the first tenth makes about half of the views.
        self._zeal_U = np.cumsum(1 / (np.arange(config.users) + config.users / 50))
        self._zeal_U /= self._zeal_U[-1]
        self._effect_device = 0.2 * rng.standard_normal(_SMALL["device"])
        self._born = lru_cache(maxsize=config.lifetime_hours + 1)(self._draw_items)

    def total_events(self) -> int:
        """Events of all hours."""
        return int(self._offset_H[-1])

    def first_event(self, hour: int) -> int:
        """Event index at which an hour begins, for `batches(start=...)`.

        Raises:
            ValueError: There is no such hour; `hours` itself gives the end.
        """
        if not 0 <= hour <= self.config.hours:
            raise ValueError(f"hour {hour} is not in 0 to {self.config.hours}")
        return int(self._offset_H[hour])

    def chunks(self, start: int) -> Iterator[Chunk]:
        """See `ChunkedSource.chunks`; a chunk is an hour."""
        first = int(np.searchsorted(self._offset_H, start, side="right")) - 1
        for hour in range(first, self.config.hours):
            begin, end = int(self._offset_H[hour]), int(self._offset_H[hour + 1])
            skip = max(start - begin, 0)
            columns = self._draw(hour).columns
            yield Chunk(
                event_N=np.arange(begin + skip, end, dtype=np.int64),
                columns={name: Column(values=value[skip:]) for name, value in columns.items()},
                end=end,
            )

    def true_p(self, hour: int) -> Floats:
        """Click probability of every event of an hour, in the order of its events.

        Raises:
            ValueError: The stream has no such hour.
        """
        return self._draw(hour).p_E

    def truth(self, start: int, stop: int) -> tuple[Floats, Floats]:
        """Labels and true probabilities of the events of hours `start` to before `stop`.

        No model is expected to have a higher AUC than the probabilities.

        Raises:
            ValueError: The stream has no such hours.
        """
        hours = [self._draw(hour) for hour in range(start, stop)]
        label_E = np.concatenate([hour.columns["y"] for hour in hours])
        return label_E, np.concatenate([hour.p_E for hour in hours])

    def write_parquet(self, path: str) -> None:
        """Writes the whole stream with the columns of `news_schema`, an hour a row group.

        Reading it gives the same batches as reading this source.

        Raises:
            OSError: The file cannot be written.
        """
        names = news_schema().columns
        kinds = {name: pa.int32() for name in names} | {name: pa.int8() for name in (*_SMALL, "y")}
        schema = pa.schema([(name, kinds[name]) for name in names])
        with pq.ParquetWriter(Path(path), schema) as out:
            for hour in range(self.config.hours):
                columns = self._draw(hour).columns
                arrays = [pa.array(columns[name], kinds[name]) for name in names]
                out.write_table(pa.Table.from_arrays(arrays, schema=schema))

    def _rng(self, tag: int, index: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self.config.seed, tag, index]))

    def _draw_items(self, birth: int) -> tuple[Any, Floats]:
        """Topics (N, K), rows summing to 1, and quality (N) of the items born in an hour."""
        config = self.config
        # Births before hour 0 exist, and a seed must not be negative.
        rng = self._rng(_ITEMS, birth + config.lifetime_hours)
        topics_NK = rng.dirichlet(np.full(config.topics, 0.3), config.new_items_per_hour)
        return topics_NK, config.quality * rng.standard_normal(config.new_items_per_hour)

    def _alive(self, hour: int) -> tuple[Ints, Ints, Any, Floats]:
        """Id, hour of birth, topics (I, K) and quality of the items shown in an hour."""
        births = range(hour - self.config.lifetime_hours + 1, hour + 1)
        items = [self._born(birth) for birth in births]
        count = self.config.new_items_per_hour
        birth_I = np.repeat(np.array(births, dtype=np.int64), count)
        first = (births.start + self.config.lifetime_hours) * count
        id_I = np.arange(first, first + len(birth_I), dtype=np.int64)
        topics_IK = np.concatenate([topics for topics, _ in items])
        return id_I, birth_I, topics_IK, np.concatenate([quality for _, quality in items])

    def _share(self, hour: int, birth_I: Ints, quality_I: Floats) -> Floats:
        """How often each item is shown in an hour, to any scale."""
        fall = np.log(2) / self.config.half_life_hours
        share_I: Floats = np.exp(0.3 * quality_I - fall * (hour - birth_I))
        return share_I

    def _swapped(self, id_I: Ints) -> Ints:
        """Ids of items from `swap_hour` on: of those before it, the most shown has the least's."""
        before = self.config.swap_hour - 1
        old_I, birth_I, _, quality_I = self._alive(before)
        by_share_I = old_I[np.argsort(self._share(before, birth_I, quality_I), kind="stable")]
        new_I = np.empty_like(old_I)
        new_I[by_share_I - old_I[0]] = by_share_I[::-1]
        there_I = id_I <= old_I[-1]
        return np.where(there_I, new_I[np.where(there_I, id_I - old_I[0], 0)], id_I)

    def _draw(self, hour: int) -> _Hour:
        config = self.config
        if not 0 <= hour < config.hours:
            raise ValueError(f"hour {hour} is not in 0 to {config.hours - 1}; raise hours")
        rng, views = self._rng(_VIEWS, hour), int(self._views_H[hour])
        id_I, birth_I, topics_IK, quality_I = self._alive(hour)
        # Better items are shown more, yet by less than they are clicked more.
        share_I = self._share(hour, birth_I, quality_I)
        share_I = np.cumsum(share_I) / share_I.sum()

        ts_V = hour * HOUR_S + _seconds(rng, views)
        user_V = _pick(rng, self._zeal_U, views)
        prev_V = _pick(rng, share_I, views)
        small_V = {name: value[user_V] for name, value in self._attribute_U.items()}
        # These two belong to the visit and not to the user.
        small_V |= {name: _skewed(rng, _SMALL[name], views) for name in ("env", "referrer")}
        cand_E = _pick(rng, share_I, views * GROUP)

        likes_VK = config.taste * self._taste_UK[user_V]
        likes_VK += config.similarity * (config.topics * topics_IK[prev_V] - 1) / 2
        daytime = 0.2 * np.sin((hour % 24) * (2 * np.pi / 24))
        context_V = config.base + self._effect_device[small_V["device"]] + daytime
        log_odds_E = np.einsum("ek,ek->e", np.repeat(likes_VK, GROUP, axis=0), topics_IK[cand_E])
        log_odds_E += np.repeat(context_V, GROUP) + quality_I[cand_E]
        log_odds_E -= config.fade * (np.repeat(ts_V, GROUP) / HOUR_S - birth_I[cand_E])
        p_E = 1 / (1 + np.exp(-log_odds_E))

        if 0 < config.swap_hour <= hour:
            id_I, user_V = self._swapped(id_I), config.users - 1 - user_V
        columns_V = {"ts": ts_V, "user_id": user_V, "prev_article": id_I[prev_V], **small_V}
        columns = {name: np.repeat(value, GROUP) for name, value in columns_V.items()}
        columns["cand"] = id_I[cand_E]
        columns["y"] = (rng.random(len(p_E)) < p_E).astype(np.int64)
        return _Hour(columns=columns, p_E=p_E)


def _seconds(rng: np.random.Generator, views: int) -> Ints:
    """Ascending seconds within an hour, each used once as long as there are enough."""
    if views <= HOUR_S:
        return np.sort(rng.permutation(HOUR_S)[:views])
    return np.sort(rng.integers(HOUR_S, size=views))


def _pick(rng: np.random.Generator, cumulative: Floats, count: int) -> Ints:
    """Draws places by cumulative shares that end in 1."""
    at = np.searchsorted(cumulative, rng.random(count), side="right")
    return np.minimum(at, len(cumulative) - 1)


def _skewed(rng: np.random.Generator, size: int, count: int) -> Ints:
    """Draws `count` values below `size`, value v with a share like 1 / (v + 1)."""
    share = np.cumsum(1 / np.arange(1, size + 1))
    return _pick(rng, share / share[-1], count)
