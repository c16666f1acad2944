"""A new run that begins with what another one has learned, its model changed or not.

    of the other run                  what the new run does with it
    rows of a table by its name       kept; other buckets, widths, chunks, dtypes are converted
    tensors of the net by their names kept where columns or shapes agree (model/carry.py), but for
                                      units that start fresh for new columns (model/renew.py)
    state of the rows' optimizer      kept where the row is, and the optimizer's name
    state of the net's optimizer      kept if the net is the same; moments of another net cost AUC
    fits of dense columns             kept by the column's name, if its settings are the same
    histories, counts                 kept if their settings are the same and the place is kept
    the place in the stream           a fork goes on from it; a warm start reads from the beginning

What the new model has and the other lacks begins as in a fresh run. The other run's folder is read
and never changed.
"""

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from embertide import _store
from embertide.trainer.config import EvalConfig, ModelConfig, OptimizerConfig
from embertide.trainer.data.labels import DelayedLabelState
from embertide.trainer.embedding.carry import Part, RowCarrier
from embertide.trainer.embedding.store import store_tables
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.model.build import build_net
from embertide.trainer.model.carry import Carried, axes_of, carry
from embertide.trainer.model.renew import renew
from embertide.trainer.model.transforms import fitted_columns
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.snapshot import former_layouts
from embertide.trainer.run.checkpoint import checkpoint as checkpoints
from embertide.trainer.run.checkpoint.checkpoint import CheckpointError, SavedCheckpoint
from embertide.trainer.run.checkpoint.settings import parsed, settings
from embertide.trainer.run.state import RunState

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """The run whose state a new run begins with.

    Attributes:
        publication: The other run's; its newest checkpoint counts.
        keep_place: Whether the new run reads the same events from where the other one stands; else
            it reads its own from their beginning.
    """

    publication: Publication
    keep_place: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Forked:
    """The state that a new run took from another one.

    Attributes:
        version: The version of the other run.
        watermark_ms: Event time of that version, ms; None: the place was not kept.
        rows: By table, how many came along.
        fresh_tables: Tables that begin empty.
        dropped_tables: Tables of the other run that the model lacks.
        grown: Tensors of the net of which both models have a part.
        fresh: Tensors of the net that begin anew.
        renewed_units: Hidden units that start fresh, in tensors that are otherwise kept.
    """

    version: int
    watermark_ms: int | None
    rows: dict[str, int]
    fresh_tables: tuple[str, ...]
    dropped_tables: tuple[str, ...]
    grown: tuple[str, ...]
    fresh: tuple[str, ...]
    renewed_units: int


def fork(state: RunState, origin: Fork) -> Forked:
    """Bring what another run has learned into a state that has learned nothing.

    Of many ranks, each takes the rows that it holds, and all take the rest.

    Raises:
        CheckpointError: There is no checkpoint, or its files are not what was written.
        ConfigurationError: The memory of pruning cannot go along, or unpruned rows would lack
            what was learned.
        TrainerError: A row's value does not fit its table's new dtype.
    """
    path = origin.publication.path
    found = checkpoints.load_newest(origin.publication)
    if found is None:
        raise CheckpointError(
            f"{path} holds no checkpoint to begin with: give the folder that `embertide train` "
            "writes to"
        )
    return carry_over(state, found, path, keep_place=origin.keep_place)


def carry_over(state: RunState, found: SavedCheckpoint, path: Path, *, keep_place: bool) -> Forked:
    """Bring what a checkpoint holds into a state of another model, as `fork`.

    Args:
        state: That has learned nothing.
        found: The checkpoint.
        path: Its publication, for the log.
        keep_place: As of `Fork`.
    """
    if state.learner.unpruned is not None:
        raise ConfigurationError(
            "prune: within needs rows of all keys, and what another run or model has learned lacks"
            f" those that it pruned ({path}): begin without --fork, --warm-start and"
            " --change-model, or give --prune-ratio"
        )
    model = parsed(ModelConfig, found.checkpoint.config["model"])
    source = _Source(found, model, found.checkpoint.config)
    rows = source.carry_rows(state, keep_place=keep_place)
    carried, units = source.carry_net(state, keep_place=keep_place)
    source.carry_rest(state, keep_place=keep_place)
    state.former = former_layouts(state.run.model, model, found.former())
    names = {table.name for table in state.run.model.tables}
    forked = Forked(
        version=found.checkpoint.version.number,
        watermark_ms=found.watermark_ms if keep_place else None,
        rows=rows,
        fresh_tables=tuple(sorted(names - rows.keys())),
        dropped_tables=tuple(sorted({table.name for table in model.tables} - names)),
        grown=carried.grown,
        fresh=carried.fresh,
        renewed_units=units,
    )
    log.info(
        "begins with version %d of %s: %d rows; tables that begin empty: %s; dropped: %s; tensors "
        "of the net that begin anew: %s; hidden units that start fresh: %d",
        forked.version,
        path,
        sum(rows.values()),
        ", ".join(forked.fresh_tables) or "none",
        ", ".join(forked.dropped_tables) or "none",
        ", ".join(forked.fresh) or "none",
        units,
    )
    return forked


def _columns(model: ModelConfig) -> set[str]:
    return {each.name for each in model.columns} | {each.name for each in model.dense}


class _Source:
    """A checkpoint of another run, taken apart by its own model."""

    def __init__(self, found: SavedCheckpoint, model: ModelConfig, config: dict[str, Any]) -> None:
        self._found, self._saved, self._model = found, found.checkpoint, model
        self._optimizer = parsed(OptimizerConfig, config["optimizer"])
        self._labels = config.get("labels")
        self._tables, self._served = (
            {table.name: table for table in store_tables(model, config["seed"], served=served)}
            for served in (False, True)
        )

    def carry_rows(self, state: RunState, *, keep_place: bool) -> dict[str, int]:
        """Bring rows of tables that both models have; return how many, by table."""
        rows, mine = state.rows, state.run.model
        before = {table.name: table for table in self._model.tables}
        counts: dict[str, int] = {}
        same = True
        for t, table in enumerate(rows.tables):
            config = mine.tables[t] if t < len(mine.tables) else None
            old = self._tables.get(table.name)
            if old is None or not self._carries(table.name, config is None, state, keep_place):
                same = False
                continue
            counters = keep_place and (
                config is not None and before[table.name].counters == config.counters
            )
            carrier = RowCarrier(
                old,
                table,
                state=self._optimizer.name == state.run.optimizer.name,
                counters=counters,
            )
            same &= old.id == table.id and carrier.same
            counts[table.name] = sum(self._import(state, t, carrier))
        self._carry_pruning(state, same=same)
        return counts

    def _carries(self, name: str, history: bool, state: RunState, keep_place: bool) -> bool:
        """Whether the rows of a table go along; those of histories do as the histories do."""
        if not history:
            return name in {table.name for table in self._model.tables}
        return keep_place and any(
            name == sequence.table and sequence in self._model.sequences
            for sequence in state.run.model.sequences
        )

    def _import(self, state: RunState, t: int, carrier: RowCarrier) -> Iterator[int]:
        rows, ownership = state.rows, state.rows.ownership
        for olds, news in carrier.groups():
            held = {b for b in news if ownership.holds(rows.ranks.rank, t, b)}
            if not held:
                continue
            served = self._served[carrier.old.name]
            parts = [Part(*self._found.read_bucket(carrier.old, served, b)) for b in olds]
            for bucket, part in carrier.carry(parts, news):
                if bucket not in held:
                    continue
                keys = _store.record_keys(carrier.new.layout, part.records)
                rows.store.import_records(t, bucket, part.records)
                if part.state is not None:
                    rows.store.set_bucket_state(t, bucket, part.state)
                if state.run.publish_budget is not None:
                    # The copy of what nodes hold, from which snapshots are written, takes them.
                    rows.store.mark_changed(t, bucket, keys)
                yield len(keys)

    def _carry_pruning(self, state: RunState, *, same: bool) -> None:
        """Go on with what pruning remembers, where it is of the same tables."""
        rows, prune = state.rows, state.run.prune
        steps, pruned_at, states = self._saved.rows
        if prune is not None and not (same and self._saved.config["prune"]):
            if prune.ratio:
                raise ConfigurationError(
                    f"prune.ratio is {prune.ratio}, and what all keys' rows would take is not known"
                    " of tables that changed: give PruneConfig(bytes=...)"
                )
            rows.go_on_at(steps, pruned_at)
            return
        rows.resume((steps, pruned_at, states), same_owners=False)

    def carry_net(self, state: RunState, *, keep_place: bool) -> tuple[Carried, int]:
        """Bring the net and its optimizer; return its tensors, and how many units are fresh."""
        learner = state.learner
        old = self._net()
        held = {table.name for table in self._model.tables}
        empty = {each.name for each in state.run.model.features if each.table not in held}
        carried = carry(self._saved.net, {} if old is None else axes_of(old), learner.net, empty)
        fresh = {name: value.clone() for name, value in learner.net.state_dict().items()}
        learner.net.load_state_dict(carried.tensors)
        learner.is_fresh = False
        units = 0
        if _columns(state.run.model) - _columns(self._model):
            units = renew(learner.net, fresh, carried.grown)
        if old is not None and not carried.grown and not carried.fresh:
            state_of_net = dict(self._saved.optimizer)
            if not (keep_place and self._optimizer.schedule == state.run.optimizer.schedule):
                state_of_net.pop("schedule", None)
            learner.load_optimizer(state_of_net)
        before = {feature.name: feature for feature in self._model.dense}
        transforms = self._found.transforms()
        fitted = {} if transforms is None else fitted_columns(transforms)
        learner.keep_fitted(
            {
                feature.name: fitted[feature.name]
                for feature in state.run.model.dense
                if before.get(feature.name) == feature and feature.name in fitted
            }
        )
        return carried, units

    def _net(self) -> nn.Module | None:
        """Return a net as the other run's; None: it cannot be made."""
        try:
            with torch.random.fork_rng(devices=()):
                return build_net(self._model)
        except ConfigurationError as error:
            log.warning(
                "the net that the other run learned cannot be made (%s): tensors go by name and "
                "shape, and the net's optimizer begins anew",
                error,
            )
            return None

    def carry_rest(self, state: RunState, *, keep_place: bool) -> None:
        """Go on from the place in the stream, with the histories up to it."""
        if not keep_place:
            return
        saved = self._saved
        state.journals = saved.journals
        state.prequential = saved.prequential
        if state.run.evaluation == parsed(EvalConfig, saved.config.get("evaluation", {})):
            state.monitor.restore(*saved.monitor)
        elif state.run.evaluation.hold_out:
            log.warning(
                "the other run may have learned from events that this one holds out: figures of "
                "the hold-out are too good until those are forgotten"
            )
        if state.run.model.heads == self._model.heads:
            state.heads.restore(*saved.heads)
        kept = dict(zip(self._model.sequences, saved.histories, strict=True))
        for history in state.histories:
            if history.config in kept:
                history.restore(kept[history.config])
            else:
                log.warning("sequence %r begins without histories", history.config.name)
        if saved.waiting is not None:
            self._carry_waiting(state, saved.waiting)
        state.cursor = tuple(saved.cursor)
        state.offset, state.done, state.events = saved.offset, saved.done, saved.events
        state.begin(saved.origin_ms)
        state.number = max(1, state.number_at(self._found.watermark_ms))

    def _carry_waiting(self, state: RunState, waiting: DelayedLabelState) -> None:
        """Bring the impressions that wait for their labels, with the columns that they have.

        Raises:
            ConfigurationError: The model has other columns, or labels are waited for otherwise.
        """
        mine, before = state.run.model, self._model
        same = (mine.features, mine.dense) == (before.features, before.dense)
        if not same or state.waiting is None or settings(state.run)["labels"] != self._labels:
            raise ConfigurationError(
                "impressions wait for labels, with the columns of the model before: keep features, "
                "dense columns and `labels` as they were, or read from the beginning: --warm-start"
            )
        state.waiting.restore(waiting)
