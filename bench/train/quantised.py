"""Log loss against bytes: rows learned in fp32 and served as fp16, int8, int4 or codes of PQ.

Each block is scored with what nodes would hold in every form at once, so that all forms are of one
run. At the end of a block the rows that changed are encoded again. Codebooks are a part of a
version: renewed every so many versions, as at a snapshot, and kept between. Counters stay fp32.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench import plot, report
from bench.report import CONSOLE
from bench.servers import BUILD
from bench.train.codebooks import CODEWORDS, Codebook, Codes, Floats
from bench.train.pruning import case_of, whole
from bench.train.quality import CROSSED, DLRM
from bench.train.runs import (
    DAY_S,
    Case,
    FoldedLearner,
    Outcome,
    Stream,
    mean_and_error,
    mean_row,
    outcomes,
)
from embertide import _store
from embertide.trainer.config import PruneConfig, RowDtype, RunConfig, TableConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.embedding.records import encode_rows
from embertide.trainer.eval.blocks import BlockQuality
from embertide.trainer.eval.prequential import Prequential
from embertide.trainer.model.export import evaluating

_CLAIM = "F.4"
_CURVE = BUILD / "bench" / "train_quantised.svg"
_HEAD_BYTES = 12  # of a record
_FEWEST = 4 * CODEWORDS  # rows of a table that codewords are learned for; others are int8
_MAX_LOST = 0.001  # of log loss
_RENEWED = 12  # versions


def stored(dtype: str) -> Callable[[Floats], Floats]:
    """Return what values read as in rows of a type of the store, as versions have them."""

    def served(values_ND: Floats) -> Floats:
        dim = values_ND.shape[1]
        whole, layout = (_store.RowLayout(dtype=each, chunk_dim=dim) for each in ("fp32", dtype))
        keys_N = np.arange(len(values_ND), dtype=np.uint64)
        records = encode_rows(whole, keys_N, np.ascontiguousarray(values_ND)).tobytes()
        found_ND: Floats = _store.decode_records(
            layout, _store.convert_records(whole, layout, records)
        )[3]
        return found_ND

    return served


def fp16(values_ND: Floats) -> Floats:
    """Return values as fp16 says them."""
    return values_ND.astype(np.float16).astype(np.float32)


def one_scale(values_ND: Floats) -> Floats:
    """Return values in 7 steps to either side of zero, of a scale by the largest value."""
    scale_N1 = np.abs(values_ND).max(axis=1, keepdims=True) / np.float32(7)
    step_N1 = np.where(scale_N1 == 0, np.float32(1), scale_N1)
    found_ND: Floats = np.clip(np.rint(values_ND / step_N1), -7, 7) * scale_N1
    return found_ND


def least_and_step(values_ND: Floats) -> Floats:
    """Return values in 15 steps from the least on; step and least in fp16, as FBGEMM has them."""
    least_N1 = fp16(values_ND.min(axis=1, keepdims=True))
    step_N1 = fp16((values_ND.max(axis=1, keepdims=True) - least_N1) / np.float32(15))
    divisor_N1 = np.where(step_N1 == 0, np.float32(1), step_N1)
    steps_ND = np.clip(np.rint((values_ND - least_N1) / divisor_N1), 0, 15)
    found_ND: Floats = steps_ND * step_N1 + least_N1
    return found_ND


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A form in which nodes hold rows.

    Attributes:
        name: The name of its figures.
        bits: Of a value.
        beside: Bytes of a row beside its values: scales.
        served: Values as they come back; None: codes of PQ.
        piece: Values of a code.
        scaled: Whether codes are of a row over its largest value, which fp16 says.
        renewed: Versions from one codebook to the next; 0: the first stays.
    """

    name: str
    bits: float
    beside: int = 0
    served: Callable[[Floats], Floats] | None = None
    piece: int = 0
    scaled: bool = False
    renewed: int = _RENEWED


def _same(values_ND: Floats) -> Floats:
    return values_ND


def _codes(name: str, piece: int, *, scaled: bool = False, renewed: int = _RENEWED) -> Form:
    beside = 2 if scaled else 0
    return Form(
        name=name, bits=8 / piece, beside=beside, piece=piece, scaled=scaled, renewed=renewed
    )


_PLAIN = Form(name="fp32", bits=32, served=_same)
_INT8 = Form(name="int8", bits=8, beside=4, served=stored("int8"))
FORMS = (
    _PLAIN,
    Form(name="fp16", bits=16, served=stored("fp16")),
    _INT8,
    Form(name="int4", bits=4, beside=4, served=stored("int4")),
    Form(name="4 bits from the least value on", bits=4, beside=4, served=least_and_step),
    Form(name="4 bits, a scale by the largest", bits=4, beside=4, served=one_scale),
    _codes("PQ 8x", 2),
    _codes("PQ 16x", 4),
    _codes("PQ 16x, first codebook kept", 4, renewed=0),
    _codes("PQ 16x and a scale", 4, scaled=True),
)
# Those that the picture's lines go through.
_BARRED = ("int4", "PQ 8x", "PQ 16x", "PQ 16x and a scale")
_METRICS = {
    "log_loss": "log loss",
    "auc": "AUC",
    "bytes": "bytes of rows at the end",
    "day": "bytes of a day's deltas",
    "differing": "bytes of a day's deltas, of rows that read otherwise",
}
_LINE = ("fp32", "fp16", "int8", "int4", "PQ 8x", "PQ 16x")


def _scale(form: Form, values_ND: Floats) -> Floats:
    """Return what codes are of a row over."""
    if not form.scaled:
        return np.ones((len(values_ND), 1), np.float32)
    scale_N1 = fp16(np.abs(values_ND).max(axis=1, keepdims=True))
    return np.where(scale_N1 == 0, np.float32(1), scale_N1)


@dataclasses.dataclass(slots=True)
class _Held:
    """A table as nodes hold it in one form, by slot."""

    form: Form
    values_RD: Floats
    codes_RS: Codes | None = None
    book: Codebook | None = None
    age: int = 0  # versions of the codebook
    # Bytes of each version's records, and of those of rows that read otherwise than before.
    sent: list[int] = dataclasses.field(default_factory=list)
    differing: list[int] = dataclasses.field(default_factory=list)


class Copies:
    """The rows of one table, as trained and in every form. Slots of rows that go are not reused."""

    def __init__(self, table: TableConfig, forms: Sequence[Form], seed: int) -> None:
        """Begin without rows."""
        self._table, self._seed = table, seed
        self._key_N = np.empty(0, np.uint64)  # ascending
        self._slot_N = np.empty(0, np.int64)
        self._used = 0
        self._values_RW = np.empty((0, table.width), np.float32)
        self._live_R = np.empty(0, np.uint16)
        self._in_use_R = np.empty(0, np.bool_)  # changed since a codebook was learned
        self.held = [_Held(form, np.empty((0, table.dim), np.float32)) for form in forms]
        # Squared errors of rows that changed, and their squares, by form and age of its codebook.
        self.drift: dict[tuple[str, int], NDArray[np.float64]] = {}

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._key_N)

    def find(self, keys_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of keys; -1: no row."""
        key_B = keys_B.view(np.uint64)
        if not len(self._key_N):
            return np.full(len(key_B), -1)
        at_B = np.minimum(np.searchsorted(self._key_N, key_B), len(self._key_N) - 1)
        return np.where(self._key_N[at_B] == key_B, self._slot_N[at_B], -1)

    def _grow(self, rows: int) -> None:
        if rows <= len(self._live_R):
            return
        more = max(rows, 2 * len(self._live_R)) - len(self._live_R)

        def grown(array: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)])

        self._values_RW, self._live_R = grown(self._values_RW), grown(self._live_R)
        self._in_use_R = grown(self._in_use_R)
        for held in self.held:
            held.values_RD = grown(held.values_RD)
            if held.codes_RS is not None:
                held.codes_RS = grown(held.codes_RS)

    def take(
        self,
        key_N: NDArray[np.uint64],
        live_N: NDArray[np.uint16],
        values_NW: Floats,
        version: int,
    ) -> None:
        """Take the changes of a version: rows, and tombstones without a live chunk."""
        is_row_N = live_N != 0
        gone_N = key_N[~is_row_N]
        kept = ~np.isin(self._key_N, gone_N)
        self._key_N, self._slot_N = self._key_N[kept], self._slot_N[kept]
        key_N, live_N, values_NW = key_N[is_row_N], live_N[is_row_N], values_NW[is_row_N]
        slot_N = self.find(key_N.view(np.int64))
        new_N = np.flatnonzero(slot_N < 0)
        self._grow(self._used + len(new_N))
        slot_N[new_N] = np.arange(self._used, self._used + len(new_N))
        self._used += len(new_N)
        keys = np.concatenate([self._key_N, key_N[new_N]])
        order = np.argsort(keys, kind="stable")
        self._key_N = keys[order]
        self._slot_N = np.concatenate([self._slot_N, slot_N[new_N]])[order]
        dim = self._table.dim
        alike_N = (self._live_R[slot_N] == live_N) & (
            self._values_RW[slot_N, dim:] == values_NW[:, dim:]
        ).all(axis=1)
        self._values_RW[slot_N], self._live_R[slot_N] = values_NW, live_N
        self._in_use_R[slot_N] = True
        for held in self.held:
            self._encode(held, slot_N, alike_N, version, _HEAD_BYTES * len(gone_N))

    def _encode(
        self,
        held: _Held,
        slot_N: NDArray[np.int64],
        alike_N: NDArray[np.bool_],
        version: int,
        tombstones: int,
    ) -> None:
        form = held.form
        size_N = self._record_bytes(form, slot_N, coded=held.book is not None)
        sent = differing = tombstones
        if form.served is None and self._renews(held, version):
            sent += self._renew(held, version, slot_N)
            differing = sent
        before_ND = held.values_RD[slot_N]
        after_ND = self._served(held, slot_N)
        held.values_RD[slot_N] = after_ND
        differs_N = ~alike_N | (before_ND != after_ND).any(axis=1)
        held.sent.append(sent + int(size_N.sum()))
        held.differing.append(differing + int(size_N[differs_N].sum()))
        if form.served is None and held.book is None:
            return
        true_ND = self._values_RW[slot_N, : self._table.dim]
        squares = np.square(after_ND - true_ND).sum(), np.square(true_ND).sum()
        at = (form.name, held.age)
        self.drift[at] = self.drift.get(at, np.zeros(2)) + np.array(squares, np.float64)

    def _renews(self, held: _Held, version: int) -> bool:
        held.age += 1
        if len(self) < _FEWEST:
            return False
        if held.book is None:
            return True
        return held.form.renewed > 0 and version % held.form.renewed == 0

    def _renew(self, held: _Held, version: int, changed_N: NDArray[np.int64]) -> int:
        """Learn codewords from rows in use, encode all; return bytes beside rows that changed."""
        slot_N = self._slot_N
        in_use_N = slot_N[self._in_use_R[slot_N]]
        learned_N = in_use_N if len(in_use_N) >= _FEWEST else slot_N
        values_ND = self._values_RW[learned_N, : self._table.dim]
        first = held.book is None
        held.book = Codebook.learned(
            values_ND / _scale(held.form, values_ND),
            held.form.piece,
            held.book,
            self._seed * 1000 + version,
        )
        held.age = 0
        if held.codes_RS is None:
            pieces = self._table.dim // held.form.piece
            held.codes_RS = np.zeros((len(self._live_R), pieces), np.uint8)
        other_N = slot_N[~np.isin(slot_N, changed_N)]
        before_NS = held.codes_RS[other_N]
        held.values_RD[other_N] = self._served(held, other_N)
        moved_N = other_N[first | (before_NS != held.codes_RS[other_N]).any(axis=1)]
        return held.book.bytes + int(self._record_bytes(held.form, moved_N, coded=True).sum())

    def end_of_version(self, version: int) -> None:
        """Note that rows are in use from here on, where codebooks were renewed."""
        if version % _RENEWED == 0:
            self._in_use_R[:] = False

    def _served(self, held: _Held, slot_N: NDArray[np.int64]) -> Floats:
        """Encode rows; return what they read as."""
        values_ND = self._values_RW[slot_N, : self._table.dim]
        if held.form.served is not None:
            return held.form.served(values_ND)
        if held.book is None or held.codes_RS is None:
            return stored("int8")(values_ND)
        scale_N1 = _scale(held.form, values_ND)
        held.codes_RS[slot_N] = codes_NS = held.book.encode(values_ND / scale_N1)
        return held.book.decode(codes_NS) * scale_N1 * self._live(slot_N)

    def _live(self, slot_N: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which learned values are of live chunks."""
        chunk_D = np.arange(self._table.dim, dtype=np.uint16) // np.uint16(self._table.chunk_dim)
        live_ND: NDArray[np.bool_] = (self._live_R[slot_N, np.newaxis] >> chunk_D & 1).astype(bool)
        return live_ND

    def _payload_bytes(self, form: Form, slot_N: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the bytes of rows' values, of counters as fp32."""
        chunk_W = np.arange(self._table.width, dtype=np.uint16) // np.uint16(self._table.chunk_dim)
        live_NW = (self._live_R[slot_N, np.newaxis] >> chunk_W & 1).astype(bool)
        learned_N = live_NW[:, : self._table.dim].sum(axis=1)
        counted_N = live_NW[:, self._table.dim :].sum(axis=1)
        coded_N = np.ceil(learned_N * form.bits / 8) + form.beside * (learned_N > 0)
        size_N: NDArray[np.float64] = coded_N + 4 * counted_N
        return size_N

    def _record_bytes(
        self, form: Form, slot_N: NDArray[np.int64], *, coded: bool
    ) -> NDArray[np.float64]:
        form = form if coded or form.served is not None else _INT8
        return _HEAD_BYTES + self._payload_bytes(form, slot_N)

    def bytes(self, held: _Held) -> int:
        """Return the bytes of all rows' payloads in a form, scales and codewords among them."""
        of = held.form if held.form.served is not None or held.book is not None else _INT8
        book = 0 if held.book is None else held.book.bytes
        return int(self._payload_bytes(of, self._slot_N).sum()) + book

    def book_bytes(self, held: _Held) -> int:
        """Return the bytes of codewords."""
        return 0 if held.book is None else held.book.bytes


class ServedLearner(FoldedLearner):
    """A learner whose events are scored with rows in every form at once."""

    def __init__(self, case: Case, seed: int, forms: Sequence[Form]) -> None:
        """Open the store and make the net."""
        super().__init__(case, seed)
        self._forms = forms
        tables = case.run.model.tables
        self.copies = [Copies(table, forms, seed) for table in tables]
        self.figures = [Prequential() for _ in forms]
        self.version = 0

    def score(self, batch: Batch) -> NDArray[np.float32]:
        """Return what fp32 scores; keep what every form does."""
        ready = self.prepare(batch)
        assert ready.part is not None
        with torch.no_grad(), evaluating(self.served):
            trained_BE = self._embeddings(ready.part, ready.asked)
            dense_BD = self._dense(ready.part)[0]
            forms = len(self._forms)
            every_FBE = trained_BE.unsqueeze(0).repeat(forms, 1, 1)
            self._put(batch, every_FBE.numpy())
            if not torch.equal(every_FBE[0], trained_BE):
                raise AssertionError("rows of fp32 are not those that were trained")
            score: torch.Tensor = self.served(
                dense_BD.repeat(forms, 1), every_FBE.reshape(-1, trained_BE.shape[1])
            )
        score_FB = score.reshape(forms, len(batch)).numpy()
        for figures, score_B in zip(self.figures, score_FB, strict=True):
            figures.add(batch.ts_ms_B, batch.label_B, score_B)
        first_B: NDArray[np.float32] = score_FB[0]
        return first_B

    def _put(self, batch: Batch, every_FBE: Floats) -> None:
        """Put rows in their forms where trained ones are."""
        model = self.run.model
        begin = np.cumsum([0, *model.feature_widths])
        for f, column in enumerate(model.columns):
            table = self.copies[model.table_index(column.table)]
            slot_B = table.find(np.ascontiguousarray(batch.keys_BF[:, f]))
            has_B = np.flatnonzero(slot_B >= 0)
            at = slice(begin[f], begin[f] + model.feature_dims[f])
            for held, values_BE in zip(table.held, every_FBE, strict=True):
                values_BE[has_B, at] = held.values_RD[slot_B[has_B]]

    def publish(self) -> None:
        """End a version: take the rows that changed."""
        self.version += 1
        for t, table in enumerate(self.rows.tables):
            parts = [self.rows.store.take_changes(t, b) for b in range(1 << table.bucket_bits)]
            if t < len(self.copies):
                found = _store.decode_records(table.layout, b"".join(parts))
                key_N, live_N, _, values_NW = found
                self.copies[t].take(key_N, live_N, values_NW, self.version)
                self.copies[t].end_of_version(self.version)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Quantised(Stream):
    """A stream of which each block is scored in every form.

    Series, each after its form's name: `log_loss` and `auc`, the mean of the daily ones; `bytes` of
    payloads at the end, `book` of codewords; `day`, bytes of the deltas of the last day, and
    `differing`, those of rows that read otherwise than before; `error`, the squared errors of the
    rows that a version brings over their squares, by age of the codebook.

    Attributes:
        as_trained: Whether rows are served as they were trained, and in no other form.
    """

    as_trained: bool = False

    def measure(self, case: Case, seed: int) -> Outcome:
        """See `Experiment`."""
        forms = FORMS[:1] if self.as_trained else FORMS
        learner = ServedLearner(case, seed, forms)

        def after(_: int) -> None:
            learner.publish()
            learner.note_bytes()

        quality = BlockQuality(learner, self.source(case), seen_by=self.seen_by)
        quality.run(block_s=case.block_s, batch_size=case.run.batch_size, after_block=after)
        series: dict[str, list[float]] = {}
        versions = DAY_S // case.block_s
        for n, (form, figures) in enumerate(zip(forms, learner.figures, strict=True)):
            held = [(copies, copies.held[n]) for copies in learner.copies]
            days = [
                summary.log_loss
                for day, summary in figures.daily_summaries().items()
                if self.days[0] <= day <= self.days[1]
            ]
            errors = [copies.drift for copies in learner.copies]
            ages = sorted({age for each in errors for name, age in each if name == form.name})
            nothing = np.zeros(2)
            sums = [
                np.sum([each.get((form.name, age), nothing) for each in errors], axis=0)
                for age in ages
            ]
            series |= {
                f"{form.name}: log_loss": [float(np.mean(days))],
                f"{form.name}: auc": [figures.mean_daily(*self.days)],
                f"{form.name}: bytes": [float(sum(table.bytes(each) for table, each in held))],
                f"{form.name}: book": [float(sum(table.book_bytes(each) for table, each in held))],
                f"{form.name}: day": [float(sum(sum(e.sent[-versions:]) for _, e in held))],
                f"{form.name}: differing": [
                    float(sum(sum(e.differing[-versions:]) for _, e in held))
                ],
                f"{form.name}: error": [float(each[0] / each[1]) for each in sums],
            }
        return learner.outcome(quality.all.mean_daily(*self.days), series)


def _figures(found: Sequence[Outcome], form: Form, metric: str) -> list[float]:
    return [run.series[f"{form.name}: {metric}"][0] for run in found]


def _paired(
    case: str,
    metric: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    peer: str,
    *,
    bar: float = 0.0,
) -> report.Row:
    """Compare figures of the same seeds; the spread is the differences' error."""
    mean, _ = mean_and_error(theirs)
    _, error = mean_and_error([a - b for a, b in zip(ours, theirs, strict=True)])
    return mean_row(
        case,
        ours,
        mean,
        peer,
        bar=mean * bar,
        error=0.0 if math.isnan(error) else error,
        metric=_METRICS[metric],
        better="higher" if metric == "auc" else "lower",
        claim=_CLAIM,
    )


def _rows_of(case: str, found: Sequence[Outcome]) -> list[report.Row]:
    """Return the rows of a model's forms against fp32."""
    rows = []
    for form in FORMS[1:]:
        for metric in _METRICS:
            barred = metric == "log_loss" and form.name in _BARRED
            ours, theirs = (_figures(found, each, metric) for each in (form, _PLAIN))
            bar = 1 + _MAX_LOST if barred else 0.0
            rows.append(_paired(f"{case}, {form.name}", metric, ours, theirs, "fp32", bar=bar))
        if form.served is not None:
            continue
        errors = [run.series[f"{form.name}: error"] for run in found]
        for age, of in (("just renewed", 0), ("oldest", -1)):
            row = report.measure(
                (
                    f"{case}, {form.name}, codebook {age}",
                    "error of rows sent, of their squares",
                    "",
                ),
                [each[of] for each in errors],
                better="lower",
                target=0.0,
                claim=_CLAIM,
            )
            rows.append(row)
    return rows


def _rows_of_trained(
    base: RunConfig,
    plain: Sequence[Outcome],
    seeds: Sequence[int],
    events: Quantised,
    jobs: int,
) -> list[report.Row]:
    """Return the rows of models whose rows are trained in the form that is served."""
    dtypes: tuple[RowDtype, ...] = ("int8",)
    cases = {dtype: case_of(f"DLRM, trained in {dtype}", base, dtype=dtype) for dtype in dtypes}
    found = outcomes(list(cases.values()), seeds, events, jobs=jobs)
    return [
        _paired(
            case.name,
            metric,
            _figures(found[case.name], _PLAIN, metric),
            _figures(plain, _PLAIN, metric),
            "trained in fp32",
        )
        for case in cases.values()
        for metric in ("log_loss", "auc")
    ]


def run(stream: Stream, seeds: Sequence[int], jobs: int) -> list[report.Row]:
    """Return rows of each form against fp32 of the same runs, of models pruned and not."""
    events = Quantised(**{f.name: getattr(stream, f.name) for f in dataclasses.fields(stream)})
    bases = {"DLRM": (DLRM, (10,), 2000), "crosses": (CROSSED, (24,), 500)}
    plain = {name: case_of(name, base) for name, (base, _, _) in bases.items()}
    found = outcomes(list(plain.values()), seeds, events, jobs=jobs)
    pruned = {
        name: [
            case_of(
                f"{name}, pruned {share}x",
                base,
                PruneConfig(bytes=whole(found[name]) // share, half_life=half_life),
            )
            for share in shares
        ]
        for name, (base, shares, half_life) in bases.items()
    }
    cases = [case for each in pruned.values() for case in each]
    found |= outcomes(cases, seeds, events, jobs=jobs)
    directly = dataclasses.replace(events, as_trained=True)
    rows = _rows_of_trained(plain["DLRM"].run, found["DLRM"], seeds, directly, jobs)
    curve: dict[str, list[tuple[float, float, float]]] = {}
    for name, cases in pruned.items():
        of_plain = found[name]
        for case in (plain[name], *cases):
            rows += _rows_of(case.name, found[case.name])
            for form in _LINE:
                loss = [
                    ours.series[f"{form}: log_loss"][0] / peer.series["fp32: log_loss"][0]
                    for ours, peer in zip(found[case.name], of_plain, strict=True)
                ]
                size = mean_and_error(
                    [each.series[f"{form}: bytes"][0] for each in found[case.name]]
                )
                point = (size[0] / 1e6, *mean_and_error(loss))
                curve.setdefault(f"{name}, {form}", []).append(point)
    plot.curves(
        "Log loss against bytes of rows, scales and codewords; each line: pruned, and whole",
        ("MB", "log loss, of fp32 unpruned"),
        curve,
        _CURVE,
    )
    CONSOLE.print(f"the curve: {_CURVE}")
    return rows
