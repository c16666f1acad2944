"""A published version that scores events by itself: frozen, without a node and without a run.

It does what a node does: rows of the version in a ServingStore, columns that nodes
make (crosses, histories) made as they make them, the version's transforms, and the snapshot's
compiled program with the version's tensors. So its scores are those that a node serves.

Shapes: B events of a batch, F columns of KEYS, L places of a sequence, E all embedding values.
"""

import dataclasses
from pathlib import Path
from typing import Any, Self

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from embertide import _store
from embertide.trainer.data.base import PADDING_KEY, Batch, EventSource
from embertide.trainer.data.crosses import cross_keys
from embertide.trainer.embedding.histories import items_of_rows
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.model.export import private_compiler
from embertide.trainer.model.foreign import can_run
from embertide.trainer.model.quiet import quiet_torch
from embertide.trainer.publish.chain import VersionFiles, find_version
from embertide.trainer.publish.folder import MANIFEST, Publication
from embertide.trainer.publish.snapshot import PROGRAM, read_transforms


@dataclasses.dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence whose columns are made here, of histories that versions carry."""

    user: int  # column of KEYS
    item: int
    table: int  # place among the store's tables
    length: int
    timed: bool

    @property
    def dense(self) -> int:
        """Columns of DENSE that it takes."""
        return 2 + (self.length if self.timed else 0)


class PublishedModel:
    """One version of a model, loaded. Used by one thread; all of its rows are in memory.

    Attributes:
        files: Where it came from.
        features: Names of the columns of KEYS that an event has to have, in their order.
        dense: The number of columns of DENSE that an event has to have.
        heads: Names of the scores; "score" where there is one, without a name.

    Raises:
        ConfigurationError: The version is not there, has no dense net, or its net is compiled for a
            CPU that this one is not.
        StoreError: A file fails its checksum, or there is no room in `ddr_budget_bytes`.
        PublicationError: A delta fails its checksum.
    """

    def __init__(self, files: VersionFiles, *, ddr_budget_bytes: int = 4 << 30) -> None:
        """Load it."""
        self.files = files
        manifest = files.manifest
        if not any(part["role"] == "program" for part in manifest["dense"]):
            raise ConfigurationError(f"{files.snapshot} has no dense net: it only answers lookups")
        if not can_run(manifest["dense_cpu"]):
            raise ConfigurationError(
                f"{files.snapshot}: the net is compiled for {manifest['dense_cpu']}, which this CPU"
                " is not: evaluate it on a newer one"
            )
        self._columns: list[dict[str, Any]] = manifest["features"]
        names = [each["name"] for each in self._columns]
        made = {name for each in manifest.get("sequences", []) for name in each["columns"]}
        self._crossed = [
            [names.index(name) for name in each["crossed"]]
            for each in self._columns
            if each.get("crossed")
        ]
        self.features = [
            each["name"]
            for each in self._columns
            if not each.get("crossed") and each["name"] not in made
        ]
        tables = [files.tables[number] for number in sorted(files.tables)]
        place = {table.name: t for t, table in enumerate(tables)}
        self._sequences = [
            _Sequence(
                names.index(each["user"]),
                names.index(each["item"]),
                place[each["table"]],
                len(each["columns"]),
                bool(each.get("times")),
            )
            for each in manifest.get("sequences", [])
        ]
        self.heads: list[str] = manifest.get("heads") or ["score"]
        made_dense = sum(each.dense for each in self._sequences)
        self.dense = int(manifest["dense_features"]) - made_dense
        self._tables = tables
        self._place = [place[each["table"]] for each in self._columns]
        widths = [tables[t].layout.dim for t in self._place]
        self._begin = np.cumsum([0, *widths]).tolist()
        self._transforms = read_transforms(files.snapshot)
        self._store = _store.ServingStore(
            tables=tables, ddr_budget_bytes=ddr_budget_bytes, window_versions=1
        )
        self._load_rows({table.id: t for t, table in enumerate(tables)})
        tensors = safetensors.torch.load(files.dense())
        self._tensors = [tensors[name] for name in sorted(tensors)]
        private_compiler()
        inductor: Any = torch._inductor  # not typed by torch
        with quiet_torch():
            self._program = inductor.aoti_load_package(str(files.snapshot / PROGRAM))

    @classmethod
    def open(cls, path: Path, version: int | None = None, **more: int) -> Self:
        """Load a version of a publication, the newest if none is named; or a snapshot's folder.

        Args:
            path: Folder of a publication, or of one snapshot.
            version: Its number.
            more: As in the constructor.

        Raises:
            ConfigurationError: There is no such version; or as the constructor.
        """
        if (path / MANIFEST).is_file():
            files = VersionFiles.of_snapshot(path)
            if version not in (None, files.number):
                raise ConfigurationError(
                    f"{path} is the snapshot of version {files.number}, not of {version}"
                )
            return cls(files, **more)
        publication = Publication(path)
        return cls(VersionFiles(publication, find_version(publication, version)), **more)

    def _load_rows(self, place: dict[int, int]) -> None:
        for table, bucket, records in self.files.buckets():
            self._store.stage_records(1, place[table], bucket, records)
        self._store.commit(1)
        for number, changes in enumerate(self.files.changes(), 2):
            for table, bucket, records in changes:
                self._store.stage_records(number, place[table], bucket, records)
            self._store.commit(number)

    @property
    def number(self) -> int:
        """The version's number."""
        return self.files.number

    @property
    def watermark_ms(self) -> int:
        """Event time up to which the version has learned."""
        return self.files.watermark_ms

    def check(self, source: EventSource) -> None:
        """Refuse events that have other columns than this model's requests.

        Raises:
            ConfigurationError: They have.
        """
        found = [feature.name.lower() for feature in source.schema.features]
        every = [each["name"] for each in self._columns]
        if found not in (self.features, every):
            raise ConfigurationError(
                f"version {self.number} of {self.files.manifest['model']!r} has the features "
                f"{', '.join(self.features)}; the events have {', '.join(found)}: give events of "
                "that model, with --config the run's file"
            )
        dense = self.dense if found == self.features else int(self.files.manifest["dense_features"])
        if len(source.schema.dense) != dense:
            raise ConfigurationError(
                f"version {self.number} of {self.files.manifest['model']!r} has {dense} dense "
                f"features, the events have {len(source.schema.dense)}: with --config, name the "
                "run's file"
            )

    def score(self, batch: Batch) -> NDArray[np.float32]:
        """Return score_B of the first head, as `score_heads` does."""
        score_B: NDArray[np.float32] = self.score_heads(batch)[:, 0]
        return score_B

    def score_heads(self, batch: Batch) -> NDArray[np.float32]:
        """Return score_BH of events with the columns that `check` lets pass; nothing changes."""
        batch = self._with_made(batch)
        dense_BD = batch.dense_BD
        if self._transforms is not None:
            dense_BD, _ = self._transforms.apply(np.ascontiguousarray(dense_BD))
        embeddings_BE = torch.from_numpy(self._embeddings(batch))
        with torch.no_grad():
            scores: Tensor | tuple[Tensor, ...] = self._program(
                torch.from_numpy(np.ascontiguousarray(dense_BD)), embeddings_BE, *self._tensors
            )
        return torch.stack(scores if isinstance(scores, tuple) else (scores,), dim=1).numpy()

    def _with_made(self, batch: Batch) -> Batch:
        """Return the batch with the columns that nodes make, unless it has them."""
        if batch.keys_BF.shape[1] == len(self._columns):
            return batch
        keys_BF, dense_BD = batch.keys_BF, batch.dense_BD
        for columns in self._crossed:
            keys_BF = np.column_stack((keys_BF, cross_keys(keys_BF[:, columns])))
        for sequence in self._sequences:
            items_BL, gap_BT = self._items(sequence, keys_BF[:, sequence.user])
            length_B = (items_BL != PADDING_KEY).sum(axis=1)
            repeat_B = (items_BL == keys_BF[:, sequence.item, None]).any(axis=1)
            made = (length_B, repeat_B, gap_BT)
            dense_BD = np.column_stack((dense_BD, *made)).astype(np.float32)
            keys_BF = np.concatenate((keys_BF, items_BL), axis=1)
        return dataclasses.replace(batch, keys_BF=keys_BF, dense_BD=dense_BD)

    def _items(
        self, sequence: _Sequence, user_B: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return what users liked last, and how long before the newest, as of the version."""
        layout = self._tables[sequence.table].layout
        user_U, place_B = np.unique(user_B, return_inverse=True)
        records, _ = self._store.copy_rows(sequence.table, user_U)
        key_N, items_NK = _store.decode_key_records(layout, records)
        rows_UK = np.full((len(user_U), layout.dim), PADDING_KEY, np.int64)
        rows_UK[np.searchsorted(user_U, key_N.view(np.int64))] = items_NK
        items_UL, gap_UT = items_of_rows(layout, rows_UK, sequence.length, timed=sequence.timed)
        return items_UL[place_B], gap_UT[place_B]

    def _embeddings(self, batch: Batch) -> NDArray[np.float32]:
        out_BE = np.empty((len(batch), self._begin[-1]), np.float32)
        lookups: list[_store.BagLookup] = []
        bags_F = batch.bags() if batch.lists else None
        for f, column in enumerate(self._columns):
            out_Bd = out_BE[:, self._begin[f] : self._begin[f + 1]]
            if bags_F is None:
                keys_B = np.ascontiguousarray(batch.keys_BF[:, f])
                lookups.append((self._place[f], keys_B, None, "sum", out_Bd))
                continue
            bags, place = bags_F[f], self._place[f]
            lookups.append(
                (place, bags.keys_N, bags.offsets_B1, column["pooling"], out_Bd, bags.weights_N)
            )
        self._store.lookup_bags(lookups)
        return out_BE
