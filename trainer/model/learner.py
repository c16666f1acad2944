"""A model that learns: its rows, its net, and a step of both for a batch of events.

Shapes: B events of a batch.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embertide import _store
from embertide.trainer.config import AllReduce, AsynchronousSync, RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.data.limit import take
from embertide.trainer.embedding.counters import Counters
from embertide.trainer.embedding.store import EmbeddingStore, TableKeys
from embertide.trainer.errors import ConfigurationError, FinalError, TrainerError
from embertide.trainer.model.build import build_net
from embertide.trainer.model.correction import Correction
from embertide.trainer.model.device import check_dtype, net_device
from embertide.trainer.model.dlrm import Probability
from embertide.trainer.model.export import evaluating
from embertide.trainer.model.layers import Columns
from embertide.trainer.model.loss import Loss
from embertide.trainer.model.prior import head_bias_of, label_logits, start_at
from embertide.trainer.model.reduced import Precision, multiplying_in
from embertide.trainer.model.schedule import Schedule
from embertide.trainer.model.statistics import Statistics, draw_seed
from embertide.trainer.model.transforms import make_transforms
from embertide.trainer.model.unpruned import Unpruned, check_alone, unpruned_store
from embertide.trainer.sync.dense import DenseSync
from embertide.trainer.sync.exchange import Asked
from embertide.trainer.sync.plan import Ownership
from embertide.trainer.sync.ranks import Ranks
from embertide.trainer.sync.strategy import make_dense_sync

# Its square is a number in fp32, which Adam keeps.
_MAX_GRADIENT = 1e19


class NotFiniteError(TrainerError):
    """A batch would make the net not finite; nothing has been learned from it.

    Attributes:
        reason: The part that is not finite.
    """

    def __init__(self, what: str) -> None:
        """Name what is not finite: the loss, gradients or statistics."""
        self.reason = f"{what} not finite"
        super().__init__(f"{self.reason}; lower the learning rate, or look at the batch's events")


@dataclasses.dataclass(frozen=True, slots=True)
class Learned:
    """The results of a step beside the changed state.

    Attributes:
        scores: Scores of the batch's events, from before the step, [B] or [B, H].
        missing: Dense values that were missing.
    """

    scores: NDArray[np.float32]
    missing: int


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A batch that is ready to be learned.

    Attributes:
        batch: As all ranks see it.
        part: The events that this rank learns from; None: none.
        first: Place of the part's first event in the batch.
        asked: Keys that the ranks asked of one another for it; None: this rank is alone.
    """

    batch: Batch
    part: Batch | None
    first: int
    asked: Asked | None


def part_of(batch: Batch, rank: int, size: int) -> tuple[int, int]:
    """Return the events [begin, end) that a rank learns from; a group of one ts is never split."""

    def cut(n: int) -> int:
        at = n * len(batch) // size
        if at in (0, len(batch)):
            return at
        return int(np.searchsorted(batch.ts_ms_B, batch.ts_ms_B[at]))

    return cut(rank), cut(rank + 1)


class Learner:
    """The state of a run, but for its place in the stream. For one thread; `prepare` for another.

    Sets torch's threads and seed, which are the process's. Of many ranks, each has one of these,
    and all make the same calls: `learn` with the same batch, of which each learns a part. Ranks
    that need not be at the same step (`RunConfig.sync`) each call `take_step` with batches of their
    own, and their nets differ until `Replicas.average` makes them one.

    Attributes:
        weights: Parameters of the net that learn, in its order.
        origin_ms: Time that counts are reckoned from: the first event's, unless it is set before.
        transforms: The transforms of DENSE before the net gets it. None: nothing; of a model whose
            features are fitted, they are not yet.
        is_fresh: Whether the net has its first values, and `warm_up` did not look at events yet.
        prior_H: Log odds of the labels at which the heads' biases began; None: they did not.
        missing: Dense values learned from that were missing.
        unpruned: Rows of all keys, which the net learns with where pruning has a bound
            (`PruneConfig.within`); else None.
        stops: Whether this rank wants the run to stop.
        stopping: Whether any did when the last batch was learned; the same on all ranks.
    """

    def __init__(
        self, run: RunConfig, ranks: Ranks | None = None, ownership: Ownership | None = None
    ) -> None:
        """Open the store and make the net, both as the run's seed says."""
        self.ranks = ranks or Ranks.alone()
        self.is_apart = isinstance(run.sync, AsynchronousSync) and self.ranks.size > 1
        # Those that take a step together.
        self._together = Ranks.alone() if self.is_apart else self.ranks
        torch.set_num_threads(run.threads)
        torch.manual_seed(run.seed)
        self.run = run
        self.transforms: _store.Transforms | None = None
        self._fitted: dict[str, dict[str, Any]] = {}
        if run.model.dense and not any(feature.fitted for feature in run.model.dense):
            nothing = np.empty((0, len(run.model.dense)), np.float32)
            self.transforms = make_transforms(run.model, nothing)
        self.is_fresh = True
        self.prior_H: NDArray[np.float32] | None = None
        self.missing = 0
        # Made on the CPU, so that it begins alike on any.
        self.device = net_device(run.net_device)
        check_dtype(run.net_dtype, self.device)
        self.net = build_net(run.model).to(self.device)
        self.correction: Correction | None = None
        if run.correction is not None:
            self.correction = Correction(run.correction, run.model.outputs)
        heads = 0 if self.correction is None else run.model.outputs
        self.served = Probability(self.net, corrected_heads=heads).to(self.device)
        planned = None if ownership is None else ownership.hot_rows
        if planned and isinstance(run.sync, AsynchronousSync):
            raise ConfigurationError(
                f"the plan has hot_rows of {planned}, and the ranks of {type(run.sync).__name__}"
                " take no step together: leave it out of the plan's file, or use AllReduce()"
            )
        self.rows = EmbeddingStore(
            run.model,
            optimizer=run.optimizer,
            seed=run.seed,
            devices=run.devices,
            ddr_budget_bytes=run.ddr_budget_bytes,
            ssd_budget_bytes=run.ssd_budget_bytes,
            ssd_directory=_of_rank(run.ssd_directory, self.ranks),
            prune=run.prune,
            hold_bytes=run.hold_bytes if self.ranks.size == 1 else 0,
            ranks=self.ranks,
            ownership=ownership,
            codecs=run.codecs,
            hot_rows=run.hot_rows if planned is None else planned,
            max_staleness=run.sync.max_row_staleness
            if isinstance(run.sync, AsynchronousSync)
            else None,
        )
        # Listed once: torch walks all modules for them, which a step of few events feels.
        self.weights = [each for each in self.net.parameters() if each.requires_grad]
        # Fused: one pass over a tensor; else ten, which small batches feel.
        self.optimizer = torch.optim.Adam(
            self.weights, lr=run.optimizer.dense_learning_rate, fused=True
        )
        self._beside = self._together.channel("dense")
        self.sync: DenseSync = make_dense_sync(
            AllReduce() if self.is_apart else run.sync, self.weights, self._beside
        )
        self._statistics = Statistics(self.net, self._together) if run.model.is_own_net else None
        self.origin_ms: int | None = None
        self.counters = Counters(run.model)
        self._quick = run.net_dtype != "fp32"
        self._loss = Loss(run)
        schedule = run.optimizer.schedule
        self.schedule = None if schedule is None else Schedule(schedule)
        self.stops = self.stopping = False
        self.unpruned: Unpruned | None = None
        if run.prune is not None and run.prune.within > 0:
            check_alone(self.ranks.size)
            self.unpruned = Unpruned(self.rows, unpruned_store(run), run)

    @property
    def has_statistics(self) -> bool:
        """Whether the net has numbers that it learns without a gradient, as BatchNorm's."""
        return self._statistics is not None and self._statistics.are_there

    def optimizer_state(self) -> dict[str, Any]:
        """Return the state of the net's optimizer, of its schedule and of a correction, if any."""
        state: dict[str, Any] = self.optimizer.state_dict()
        if self.schedule is not None:
            state = {**state, "schedule": self.schedule.state()}
        if self.correction is not None:
            state = {**state, "correction": self.correction.state()}
        return state

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Take what `optimizer_state` gave from a checkpoint; rates are this run's."""
        correction = state.pop("correction", None)
        if self.correction is not None and correction is not None:
            self.correction.load(correction)
            self._serve_correction()
        schedule = state.pop("schedule", None)
        if self.schedule is not None and schedule is not None:
            self.schedule.load(schedule)
        self.optimizer.load_state_dict(state)
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.optimizer.dense_learning_rate

    def keep_fitted(self, columns: dict[str, dict[str, Any]]) -> None:
        """Have transforms of these columns, by name, be as they were fitted before."""
        self._fitted = columns
        dense = self.run.model.dense
        if dense and all(not each.fitted or each.name in columns for each in dense):
            nothing = np.empty((0, len(dense)), np.float32)
            self.transforms = make_transforms(self.run.model, nothing, columns)

    def warm_up(
        self,
        batches: Iterator[Batch],
        *,
        labelled: bool = True,
        left_out: Callable[[Batch], NDArray[np.bool_]] | None = None,
    ) -> Iterator[Batch]:
        """Look at a stream's first events before any is learned; return all batches.

        The transforms are fitted on them, unless they are; and of a net that has learned nothing
        the heads' biases start at the label rate, where the net names them and the loss is the
        cross entropy. At most `warmup_events` and a batch are held, until all of them are taken;
        where there is nothing to fit, the first batch, as of a live stream the events after it may
        be long in coming, and a file is learned as a stream is.

        Args:
            batches: From the first that is learned on.
            labelled: Whether their labels may be looked at.
            left_out: Tells which events of a batch are never learned, so that their labels are not
                looked at; None: no such event.
        """
        fits = self.transforms is None and bool(self.run.model.dense)
        bias_H = head_bias_of(self.net) if labelled and self.is_fresh else None
        self.is_fresh = False
        rates = bias_H is not None and self.run.loss == "bce"
        if not (fits or rates):
            return batches
        wanted = self.run.warmup_events if fits else 1
        held, events = list[Batch](), 0
        sample = list[NDArray[np.float32]]()
        while events < wanted and (batch := next(batches, None)) is not None:
            held.append(batch)
            origin = batch.origin
            dense_BD = batch.dense_BD if origin is None else batch.dense_BD[~origin.feedback_B]
            sample.append(dense_BD)
            events += len(dense_BD)
        if held and fits:
            sample_ND = np.concatenate(sample)
            self.transforms = make_transforms(
                self.run.model, sample_ND[: self.run.warmup_events], self._fitted
            )
        if held and rates:
            self.start_at(label_logits(held, self.run.model.outputs, left_out))
        return itertools.chain(held, batches)

    def start_at(self, logit_H: NDArray[np.float32]) -> None:
        """Let the biases of the heads have these values; all ranks call it with the same."""
        bias_H = head_bias_of(self.net)
        assert bias_H is not None
        start_at(bias_H, logit_H)
        self.prior_H = logit_H

    def prepare(self, batch: Batch) -> Prepared:
        """Take this rank's part of a batch, and ask for its keys: other ranks, or the SSD.

        Raises:
            ValueError: A list is one in the batch and another thing in the model.
            RankLostError: A rank is gone.
        """
        self._check_lists(batch)
        if self.ranks.size == 1:
            stores = [self.rows] if self.unpruned is None else [self.rows, self.unpruned.rows]
            if bringing := [each for each in stores if each.brings]:
                keys = self.table_keys(batch)
                for each in bringing:
                    each.bring(keys)
            return Prepared(batch, batch, 0, None)
        begin, end = part_of(batch, self._together.rank, self._together.size)
        part = take(batch, begin, end) if begin < end else None
        if batch.lists:
            bags_F = [bags.cut(begin, end) for bags in batch.bags()]
            return Prepared(batch, part, begin, self.rows.ask(bags_F=bags_F))
        return Prepared(batch, part, begin, self.rows.ask(batch.keys_BF[begin:end]))

    def table_keys(self, batch: Batch) -> TableKeys:
        """Return the keys whose rows a batch needs.

        Raises:
            ValueError: A list is one in the batch and another thing in the model.
        """
        self._check_lists(batch)
        return self.rows.table_keys(batch.keys_BF, batch.bags() if batch.lists else None)

    def _check_lists(self, batch: Batch) -> None:
        for f, bags in batch.lists.items():
            feature = self.run.model.features[f]
            found = "list" if bags.weights_N is None else "weighed"
            if feature.keys != found:
                raise ValueError(
                    f"feature {feature.name!r} has keys={feature.keys!r}, the events have {found!r}"
                    ": give both the same"
                )

    def _embeddings(
        self, batch: Batch | None, asked: Asked | None, rows: EmbeddingStore | None = None
    ) -> Tensor:
        """Look up a batch, in the run's rows if no others are named; embeddings_BE."""
        rows = rows or self.rows
        if batch is None:
            keys_BF = np.empty((0, len(self.run.model.columns)), np.int64)
            return rows.forward(keys_BF, asked)
        if batch.lists:
            return rows.pool(batch.bags(), asked)
        embeddings_BE: Tensor = rows(batch.keys_BF, asked)
        return embeddings_BE

    def score(self, batch: Batch) -> NDArray[np.float32]:
        """Return score_B in (0, 1), of the first head, as `score_heads` does."""
        score_B: NDArray[np.float32] = self.score_heads(batch)[:, 0]
        return score_B

    def score_unpruned(self, batch: Batch) -> NDArray[np.float32]:
        """Return what `score` would be with the rows of all keys; where pruning has a bound."""
        assert self.unpruned is not None
        with torch.no_grad():
            embeddings_BE = self._embeddings(batch, None, self.unpruned.rows)
        scores = self._served(batch, embeddings_BE).numpy().reshape(len(batch), -1)
        return np.ascontiguousarray(scores[:, 0])

    def score_heads(self, batch: Batch) -> NDArray[np.float32]:
        """Return score_BH in (0, 1) of all ranks' parts, on every rank; nothing changes."""
        return self._scores(batch, contextlib.nullcontext())[0]

    def score_precisions(self, batch: Batch, *precisions: Precision) -> list[NDArray[np.float32]]:
        """Return what `score_heads` does, and the same as nodes score in each precision."""
        ways = map(multiplying_in, precisions)
        return self._scores(batch, contextlib.nullcontext(), *ways)

    def _scores(
        self, batch: Batch, *ways: contextlib.AbstractContextManager[None]
    ) -> list[NDArray[np.float32]]:
        """Return score_BH by the net in each of some contexts."""
        ready = self.prepare(batch)
        found = torch.zeros((len(ways), *self._shape_of(len(batch))))
        with torch.no_grad(), evaluating(self.served):
            embeddings_BE = self._embeddings(ready.part, ready.asked)
            if ready.part is not None:
                dense_BD = self._dense(ready.part)[0].to(self.device)
                for scores, way in zip(found, ways, strict=True):
                    with way:
                        part: Tensor = self.served(dense_BD, embeddings_BE.to(self.device))
                    scores[ready.first : ready.first + len(ready.part)] = part
            if self._together.size > 1:
                found = self._beside.sum(found, "scores").wait()
        return list(found.numpy().reshape(len(ways), len(batch), -1))

    def learn(
        self, batch: Batch | Prepared, on_rows_ready: Callable[[], None] = lambda: None
    ) -> NDArray[np.float32]:
        """Take a step and return the score_B from before it, of a net of one's own in eval mode.

        Of a model of several heads they are scores_BH. Every rank gets the scores of all ranks. A
        net of one's own draws its random numbers, as dropout's, from a seed of the run, the batch
        and the rank.

        Args:
            batch: The batch to learn.
            on_rows_ready: Called when the rows are there and the network is free, to ask for
                the next keys.

        Raises:
            NotFiniteError: Loss, gradients or statistics are no finite numbers. Net, rows and
                counters are as they were.
            RankLostError: A rank is gone.
        """
        learned = self.take_step(batch, on_rows_ready)
        self.missing += learned.missing
        self.count(batch.batch if isinstance(batch, Prepared) else batch)
        return learned.scores

    def take_step(
        self, batch: Batch | Prepared, on_rows_ready: Callable[[], None] = lambda: None
    ) -> Learned:
        """Take a step as `learn` does; neither the batch's events are counted nor what it lacks."""
        if self.rows.hot is None or not self.rows.may_prune_next():
            return self._take_step(batch, on_rows_ready)
        # Hot rows that a pass of pruning takes away go back to their owners, so that the next keys
        # cannot be asked for before it.
        try:
            learned = self._take_step(batch, lambda: None)
        except NotFiniteError:
            on_rows_ready()
            raise
        on_rows_ready()
        return learned

    def _take_step(self, batch: Batch | Prepared, on_rows_ready: Callable[[], None]) -> Learned:
        ready = batch if isinstance(batch, Prepared) else self.prepare(batch)
        for parameter in self.weights:
            parameter.grad = None
        if self._statistics is not None:
            self._statistics.keep()
        embeddings_BE = self._embeddings(ready.part, ready.asked)
        on_rows_ready()
        missing = 0
        loss = torch.zeros(())
        scores = torch.zeros(self._shape_of(len(ready.batch)))
        own_BE, served = embeddings_BE, scores
        if self.unpruned is not None:
            assert ready.part is not None
            served = self._served(ready.part, own_BE.detach())
            embeddings_BE = self._embeddings(ready.part, None, self.unpruned.rows)
        if ready.part is not None:
            dense_BD, missing = self._dense(ready.part)
            inputs = dense_BD.to(self.device), embeddings_BE.to(self.device)
            pieces = self._pieces(len(ready.part))
            logits = [] if self._statistics is None else self._evaluated(inputs, pieces)
            if self._statistics is not None:
                torch.manual_seed(draw_seed(self.run.seed, ready.batch.first, self.ranks.rank))
            for piece in pieces:
                self.sync.accumulates = piece is not pieces[-1]
                if self._together.size > 1 and not self.sync.accumulates:
                    # There before backward comes to the net's first layers: they travel meanwhile.
                    embeddings_BE.register_post_accumulate_grad_hook(lambda _: self.rows.send())
                learned = self._learned(_cut(inputs, piece))
                each = self._loss_of(learned, ready.part, piece)
                if len(learned) < len(ready.batch):
                    # The mean over the whole batch is what all parts add up to.
                    each = each * (len(learned) / len(ready.batch))
                each.backward()
                loss = loss + each.detach().cpu()
                if self._statistics is None:
                    logits.append(learned.detach())
            end = ready.first + len(ready.part)
            scores[ready.first : end] = torch.sigmoid(self._corrected(torch.cat(logits)))
        if not self.is_apart:
            self.stopping = self.stops
        if self._together.size > 1:
            loss, scores, missing = self._share(ready, loss, scores, missing)
        self._check_step(loss)
        self._step()
        if self.unpruned is None:
            self.rows.step()
        else:
            own_BE.grad = embeddings_BE.grad
            keys = self.unpruned.to_bring(self.table_keys(ready.batch))
            self.unpruned.rows.step()
            self.rows.step()
            self.unpruned.bring(keys)
            self.unpruned.add(ready.batch.label_B, scores.numpy(), served.numpy())
            scores = served
        if self.correction is not None:
            labels = ready.batch.labels(self.run.model.outputs)
            self.correction.add(labels, scores.numpy(), ready.batch.weight_B, self._offset_H)
            self._serve_correction()
        return Learned(scores.numpy(), missing)

    def _served(self, part: Batch, embeddings_BE: Tensor) -> Tensor:
        """Return scores of embeddings as they are served, [B] or [B, H]."""
        with torch.no_grad(), evaluating(self.served):
            dense_BD = self._dense(part)[0].to(self.device)
            scores: Tensor = self.served(dense_BD, embeddings_BE.to(self.device))
        return scores.cpu().reshape(self._shape_of(len(part)))

    def _corrected(self, logits: Tensor) -> Tensor:
        """Return logits with the correction of events that are about to be learned."""
        return logits if self.correction is None else logits + torch.from_numpy(self._offset_H)

    @property
    def _offset_H(self) -> NDArray[np.float32]:
        """The correction of such events: with pruning, whose loss is measured, that of versions."""
        assert self.correction is not None
        return self.correction.offset_H if self.unpruned is None else self.correction.served_H

    def _serve_correction(self) -> None:
        assert self.correction is not None
        self.served.get_buffer("correction_H").copy_(torch.from_numpy(self.correction.served_H))

    def count(self, batch: Batch) -> None:
        """Count the events of a batch for the tables that count; `learn` has done it."""
        if self.origin_ms is None:
            self.origin_ms = int(batch.ts_ms_B[0])
        self.counters.add(batch, self.origin_ms)

    def _shape_of(self, events: int) -> tuple[int, ...]:
        """Return the shape of so many events' logits."""
        heads = self.run.model.outputs
        return (events,) if heads == 1 else (events, heads)

    def _pieces(self, events: int) -> list[slice]:
        """Return the pieces that go through the net one after the other."""
        parts = min(self.run.net_parts, events)
        cuts = [events * part // parts for part in range(parts + 1)]
        return [slice(*cut) for cut in itertools.pairwise(cuts)]

    def _evaluated(self, inputs: tuple[Tensor, Tensor], pieces: list[slice]) -> list[Tensor]:
        """Return each piece's logits in eval mode."""
        with torch.no_grad(), evaluating(self.net):
            return [self._forward(_cut(inputs, piece)) for piece in pieces]

    def _learned(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Return logits that take a gradient."""
        if self._statistics is None or len(inputs[0]) > 1:
            return self._forward(inputs)
        with evaluating(self.net):  # one event has no variance to normalise by
            return self._forward(inputs)

    def _forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._quick):
            logits: Tensor = self.net(*inputs).float()
        return logits.reshape(self._shape_of(len(inputs[0])))

    def _loss_of(self, logits: Tensor, part: Batch, piece: slice) -> Tensor:
        labels = torch.from_numpy(part.labels(self.run.model.outputs)[piece])
        weight_B = None if part.weight_B is None else torch.from_numpy(part.weight_B[piece])
        return self._loss(
            logits,
            labels.to(self.device),
            None if weight_B is None else weight_B.to(self.device),
        )

    def _step(self) -> None:
        """Take the step of the net, at the rate of its schedule."""
        if self.schedule is None:
            self.optimizer.step()
            return
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.optimizer.dense_learning_rate * self.schedule.factor
        self.optimizer.step()
        self.schedule.step()

    def _share(
        self, ready: Prepared, loss: Tensor, scores: Tensor, missing: int
    ) -> tuple[Tensor, Tensor, int]:
        """Bring the parts of all ranks together: gradients of the net, loss, scores.

        Where a rank has no part its scores and gradients are zeros, so sums are exact. Gradients of
        rows travel meanwhile.
        """
        flags = torch.tensor([float(missing), float(self.stops)])
        beside = torch.cat((scores.reshape(-1), loss.reshape(1), flags))
        ends = len(beside)
        if self._statistics is not None:
            share = 0 if ready.part is None else len(ready.part) / len(ready.batch)
            beside = torch.cat((beside, self._statistics.changes() * share))
        ranks, heads = range(self._together.size), self.run.model.outputs
        cuts = (part_of(ready.batch, rank, self._together.size) for rank in ranks)
        wait = self.sync.finish(beside, [(heads * begin, heads * end) for begin, end in cuts])
        self.rows.send()
        summed = wait()
        if self._statistics is not None:
            self._statistics.change(summed[ends:])
        loss, missed, stops = summed[ends - 3 : ends].unbind()
        self.stopping = bool(stops > 0)
        return loss, summed[: ends - 3].reshape(scores.shape), int(missed)

    def _check_step(self, loss: Tensor) -> None:
        """Refuse a step after which the net would not be finite.

        Adam's state and with it the net stay finite if the squares of gradients are. Rows refuse
        such sums of gradients themselves (`refused_gradients`).
        """
        gradients = [each.grad for each in self.weights if each.grad is not None]
        norms = torch.stack((loss.to(self.device), *torch._foreach_norm(gradients)))
        kept = self._statistics is None or self._statistics.are_finite()
        if not (kept and bool((norms < _MAX_GRADIENT).all())):
            self.rows.drop_gradients()
            if self.unpruned is not None:
                self.unpruned.rows.drop_gradients()
            self.sync.undo()
            if self._statistics is not None:
                self._statistics.restore()
            what = "loss" if not torch.isfinite(loss) else "gradients" if kept else "statistics"
            raise NotFiniteError(what)

    def check_finite(self) -> None:
        """Refuse a net that must not be published.

        Raises:
            TrainerError: A tensor has a value that is not finite, or a buffer has changed that
                versions do not carry.
        """
        if self._statistics is not None:
            self._statistics.check()
        for name, tensor in self.served.state_dict().items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise FinalError(
                    f"tensor {name} of the net is not finite, though every step was: version not "
                    "published; start again, which goes on from the last checkpoint, with a lower "
                    "dense_learning_rate"
                )

    def refresh(self, now_ms: int) -> None:
        """Bring all events learned into the counts that rows have, and the net sees as of now.

        To be called when a version ends, and not within one: so training sees the counts that
        serving gives between this version and the next.
        """
        if self.correction is not None:
            self.correction.version_goes_out()
        if self.origin_ms is None:
            return
        beside = None if self.unpruned is None else self.unpruned.rows
        self.counters.flush(self.rows, self.origin_ms, beside)
        if self.unpruned is not None:
            self.unpruned.refresh()
        for module in self.net.modules():
            if isinstance(module, Columns):
                module.set_now((now_ms - self.origin_ms) / 1000)

    def _dense(self, batch: Batch) -> tuple[Tensor, int]:
        """Return what the net gets, and how many values were missing."""
        if self.transforms is None:
            assert not self.run.model.dense, "the transforms are fitted by warm_up, which is first"
            return torch.from_numpy(batch.dense_BD), 0
        dense_BD, missing = self.transforms.apply(batch.dense_BD)
        return torch.from_numpy(dense_BD), missing


def _cut(inputs: tuple[Tensor, Tensor], piece: slice) -> tuple[Tensor, Tensor]:
    """Return the piece of both inputs; a whole one as it is, whose gradient needs no copy."""
    if len(inputs[0]) == piece.stop - piece.start:
        return inputs
    return inputs[0][piece], inputs[1][piece]


def _of_rank(directory: str, ranks: Ranks) -> str:
    """Return where a rank keeps what each has for itself."""
    return directory if ranks.size == 1 or not directory else f"{directory}/rank-{ranks.rank}"
