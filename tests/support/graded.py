"""A model whose rows are click rates, so that good versions are good and poison is poison.

It is the checker's net with its weight at 0: the score is 1000 times the largest value of any row.
The row of a key with rate p holds p / 1000, and an event is a click with the larger rate of its two
keys. So the true rates have the best AUC that there is, and are calibrated.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from checker import CONFIG, DIM, KEYS, TABLES, CheckerNet, bucket_of, dense_tensors
from numpy.typing import NDArray

from embertide import _store
from embertide.trainer.data.base import Batch
from embertide.trainer.model.export import export_dense
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.publish.publisher import Change, Publisher
from embertide.trainer.publish.snapshot import (
    DensePart,
    SnapshotInfo,
    schema_id,
    write_snapshot,
)

Poison = Literal["nan", "shuffled", "flipped"]
POISONS: tuple[Poison, ...] = ("nan", "shuffled", "flipped")
EVERY_MS = 1000
SNAPSHOT_EVERY = 6
Rates = NDArray[np.float64]
"""Rates by table and key."""


def true_rates(seed: int = 5) -> Rates:
    return np.asarray(np.random.default_rng(seed).beta(1.2, 6.0, (len(TABLES), KEYS)))


def events(rates: Rates, seed: int, *, first_ms: int = 0, batch_size: int = 256) -> Iterator[Batch]:
    """Endless labelled events, one a millisecond."""
    rng, at = np.random.default_rng(seed), first_ms
    while True:
        keys_BF = rng.integers(0, KEYS, (batch_size, len(TABLES)))
        chance_B = np.maximum(*(rates[t][keys_BF[:, t]] for t in range(len(TABLES))))
        index_B = np.arange(at, at + batch_size)
        yield Batch(
            first=at,
            next_offset=at + batch_size,
            event_B=index_B,
            ts_ms_B=index_B,
            keys_BF=keys_BF,
            dense_BD=np.empty((batch_size, 0), np.float32),
            label_B=(rng.random(batch_size) < chance_B).astype(np.float32),
        )
        at += batch_size


def learned(rates: Rates, seed: int, *, flipped: bool = False, batches: int = 400) -> Rates:
    """Return the rates that counting learns from a stream, or from its flipped labels."""
    clicks, views = np.full(rates.shape, 0.5), np.full(rates.shape, 2.0)
    for _, batch in zip(range(batches), events(rates, seed), strict=False):
        label_B = 1 - batch.label_B if flipped else batch.label_B
        for t in range(len(TABLES)):
            np.add.at(clicks[t], batch.keys_BF[:, t], label_B)
            np.add.at(views[t], batch.keys_BF[:, t], 1)
    return np.asarray(clicks / views)


def changes(rates: Rates) -> list[Change]:
    made: list[Change] = []
    for t, table in enumerate(TABLES):
        records: dict[int, bytes] = {}
        for key in range(KEYS):
            value = np.full(DIM, rates[t][key] / 1000, np.float32)
            record = _store.encode_record(key, 1, 0, _store.encode_payload(table.layout, 1, value))
            bucket = bucket_of(table, key)
            records[bucket] = records.get(bucket, b"") + record
        made += [(table, bucket, records[bucket]) for bucket in sorted(records)]
    return made


class GradedPublisher:
    """Publishes good versions and poisoned ones, past any check of a trainer."""

    def __init__(self, folder: Path, bus: str | None, cache: Path) -> None:
        self.publication, self.bus = Publication(folder), bus
        self.rates = true_rates()
        self.rng = np.random.default_rng(11)
        if not self.publication.program.exists():
            export_dense(
                CheckerNet(1),
                self.publication.program,
                dense_features=0,
                embedding_dim=len(TABLES) * DIM,
                cache=cache,
            )
        self.take_over()
        self._snapshot(VersionId(1, self.publisher.lineage), 0, self._good())
        self.publisher.adopt(1, watermark_ms=0, dense=dense_tensors(0))

    def _snapshot(self, version: VersionId, watermark_ms: int, rates: Rates) -> None:
        info = SnapshotInfo.of(
            CONFIG, lineage=version.lineage, version=version.number, watermark_ms=watermark_ms
        )
        part = DensePart(
            program=self.publication.program, cpu="x86-64-v3", tensors=dense_tensors(0)
        )
        path = self.publication.snapshot_path(version)
        write_snapshot(path, info, TABLES, changes(rates), part)

    def take_over(self) -> None:
        """Go on as a trainer that was started again."""
        info = SnapshotInfo.of(CONFIG, lineage=0, version=0, watermark_ms=0)
        self.publisher = Publisher(
            self.publication, bus=self.bus, model=CONFIG.name, schema_id=schema_id(info, TABLES)
        )

    def _good(self) -> Rates:
        """Rates off by a few percent, as those of a model that learns."""
        return np.asarray(self.rates * np.exp(self.rng.normal(0, 0.03, self.rates.shape)))

    def _poisoned(self, poison: Poison) -> Rates:
        if poison == "nan":
            rates = self._good()
            rates[0, 17] = np.nan  # one row, which few events ask for
            return rates
        if poison == "shuffled":
            return np.stack([self.rng.permutation(table) for table in self._good()])
        return learned(self.rates, seed=int(self.rng.integers(1 << 30)), flipped=True)

    def publish(self, poison: Poison | None = None) -> int:
        """Publish the next version; returns its number."""
        assert self.publisher.newest is not None
        number = self.publisher.newest.number + 1
        rates = self._good() if poison is None else self._poisoned(poison)
        version = self.publisher.publish(
            number,
            watermark_ms=EVERY_MS * number,
            changes=changes(rates),
            dense=dense_tensors(0),
        )
        if number % SNAPSHOT_EVERY == 0:  # as trainers do; of a poisoned version, too
            self._snapshot(version, EVERY_MS * number, rates)
        return number
