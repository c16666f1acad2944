"""A run: a model, how it learns, what it publishes, and what it may take of the machine."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from embertide.trainer.config.changes import ALLOWED, CHANGE, allowed, because, fixed, free
from embertide.trainer.config.choices import check_choice
from embertide.trainer.config.evaluation import EvalConfig
from embertide.trainer.config.labels import LabelJoin
from embertide.trainer.config.learning import CorrectionConfig, OptimizerConfig, PruneConfig
from embertide.trainer.config.model import ModelConfig
from embertide.trainer.config.served import ReducedConfig
from embertide.trainer.config.sync import AllReduce, AsynchronousSync, Sync, check_sync
from embertide.trainer.config.user_objects import name_of

NetDtype = Literal["fp32", "bf16", "bf16_emulated"]
NetDevice = Literal["auto", "cpu", "cuda"]
Codec = Literal["fp32", "bf16", "fp16", "int8"]  # of what ranks exchange

MAX_HELD_BATCHES = 64
"""Batches of a window, at most: more would only hold rows, and delay what is learned."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PublishBudget:
    """A bound on the bytes of versions: rows that moved farthest go first, the others wait.

    docs/design/0012-priority-deltas.md has the rule and what it costs in AUC.

    Attributes:
        bytes_per_s: Bound on row records, in bytes per second of event time. Rows that waited
            `max_age_versions`, and tombstones, go out beside it.
        max_age_versions: A changed row goes out after at most so many versions.
        image_bytes: Memory for the trainer's copy of what nodes hold: every row's payload and
            index a second time.
    """

    bytes_per_s: int = dataclasses.field(metadata={CHANGE: ALLOWED})
    max_age_versions: int = allowed(1008)
    image_bytes: int = free(2 << 30)

    def __post_init__(self) -> None:
        """Refuse what bounds nothing."""
        for name in ("bytes_per_s", "max_age_versions", "image_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Codecs:
    """How what ranks exchange travels: docs/training.md, "Many ranks", has what each costs in AUC.

    Attributes:
        rows: "fp32"; "bf16" or "fp16", half the bytes; or "int8", a quarter and 4 bytes a row.
        gradients: The same, of rows' gradients; what int8 rounds off goes with a key's next one.
    """

    rows: Codec = allowed("fp32")
    gradients: Codec = allowed("fp32")

    def __post_init__(self) -> None:
        """Refuse a codec that does not exist."""
        for name in ("rows", "gradients"):
            check_choice(f"codecs: {name}", getattr(self, name), Codec)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A training run. Two runs of equal configs over equal inputs give equal bytes.

    Attributes:
        model: Tables, features and dense net.
        optimizer: How rows and net learn.
        prune: Which rows stay; None: every key keeps its row.
        labels: How long impressions wait for feedback, where that is a stream of its own; None:
            events have their labels.
        negative_rate: The share of events with label 0 that is learned; each then counts as many as
            it stands for, and all are scored. Less takes less time, and gives rows to fewer keys.
        seed: Seed of the net and of new rows.
        batch_size: Events of a step, at least: a group of one time is never split. Small batches
            learn more from each event, large ones go faster.
        correction: Has each head's scores follow its label rate, in each version; None: they are
            the net's.
        loss: "bce", the cross entropy of logits; or a function of your own (docs/training.md). It
            is kept as text, "package.module:name", which may also be given.
        net_parts: A batch goes through the net in so many parts, whose gradients add up before the
            one step: a large batch then takes the memory of a part.
        net_dtype: The type in which the dense net multiplies while it learns: "fp32", or "bf16",
            which is faster where the CPU has AMX or AVX-512 BF16, and refused where it has neither;
            with "bf16_emulated" such a CPU does it too, many times slower. Weights, rows, and all
            that is published stay fp32.
        serve_reduced: Publishes a program in reduced precision, bf16 or int8, beside that in fp32.
            Nodes whose CPU has the instructions run it for many samples, while the AUC that it
            loses and the errors of its scores on the run's last day, which each version says, are
            within bounds. None: fp32 alone.
        net_device: Where the dense net learns: "cpu", "cuda", or "auto", a GPU where torch has one.
            Rows are in the store on any, and nodes serve the net on the CPU. A run that goes on
            elsewhere learns the same within rounding, and repeats bit for bit on one of them alone.
        threads: Threads of torch and of the store's step, on each rank; a part of what repeats bit
            for bit.
        warmup_events: First events of a fresh run that are looked at before they are learned from:
            transforms of dense features are fitted on them, where a feature needs it, and the
            heads' biases start at their label rate (model/prior.py). 50,000 tell a share to 0.005.
        ahead_bytes: Bound on the bytes that another thread reads and prepares ahead while a batch
            is learned; 0 reads between steps. 64 MiB hold some chunks of a file, which are read at
            once.
        publish_every_s: Event time between versions, in seconds: how stale the served model gets.
        publish_budget: Bounds the bytes of versions; None: a version has every row that changed.
        snapshot_every: Versions from one snapshot, with its checkpoint, to the next: what a killed
            trainer learns again, and how many deltas a node that starts reads.
        full_snapshot_every: One in this many snapshots has all rows; those between are incremental:
            they hold the learned state of the rows that changed since, and rest on that one and on
            the delta files after it, which all stay meanwhile. A full one comes earlier where half
            of the rows have changed or those files take as much as it, and at the end of a run.
        keep_snapshots: Snapshots kept, with the deltas that follow the oldest. Two, so that nodes
            that load one while the next is written find it, and should one's checkpoint be harmed.
        keep_snapshots_s: Those of the last so many seconds of wall clock are kept, too.
        checkpoint_memory_bytes: Copies of rows that wait to be written as a checkpoint; beyond it
            training waits. The default has room for a model of 10^7 rows of 16 values.
        cpu: Baseline of the compiled dense program: the oldest CPU that is to serve it.
        bus_bytes: Bound on the Redis memory of the versions on the bus; a larger version, and those
            that nodes have not applied when newer ones need the room, go by files alone. 512 MiB
            hold a minute or two of a full write rate.
        devices: CPU arenas that share the budgets; nothing that is learned depends on it, but for
            which of several new rows finds the last room where rows are pruned.
        ddr_budget_bytes: Memory of rows, optimizer state and index, of each rank; what exceeds it
            is refused and counted where there is no SSD.
        ssd_budget_bytes: Disk for rows that memory does not hold; 0 does without.
        ssd_directory: Where they lie; needed with a budget.
        hold_bytes: The part of `ddr_budget_bytes`, at most half, for the rows of batches that were
            read ahead, which are brought from the SSD and held until these are learned. 0: rows of
            the next batch are brought, and none is held.
        hold_batches: The number of batches ahead; 0: as many as the drive needs to keep up with the
            net, and as fit. More than 0 is refused where the rows of so many may not fit.
        hot_rows: Rows, at most, that a rank answers for in place of the one that owns their bucket,
            where this one is asked for much more than others are: the set is chosen anew with each
            version. 0: none. One rank has no use for it.
        most_set_aside: Batches in a row that may be put aside, as they would make the net not
            finite; one more ends the run.
        codecs: How rows and gradients travel between ranks; of no matter to one rank.
        sync: How ranks bring their dense nets together: `AllReduce()` or `DCT()` in every step; or
            `PartialAllReduce()`, `Hop()` or `LocalSGD()`, whose ranks need not be at the same step.
        evaluation: The figures that the run measures of itself, and the events that it holds out.
    """

    model: ModelConfig = dataclasses.field(
        metadata=because("the dense net has that form", carried=True)
    )
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    prune: PruneConfig | None = fixed(
        None, "what pruning remembers begins with a run", carried=True
    )
    labels: LabelJoin | None = fixed(None, "impressions wait in checkpoints by it")
    negative_rate: float = allowed(1.0)
    seed: int = fixed(1, "new rows get their values from it", carried=True)
    batch_size: int = allowed(256)
    correction: CorrectionConfig | None = fixed(
        None, "the folder's dense program has it, or has it not"
    )
    loss: str | Callable[..., Any] = allowed("bce")
    net_parts: int = allowed(1)
    net_dtype: NetDtype = allowed("fp32")
    serve_reduced: ReducedConfig | None = fixed(
        None, "the folder's dense program has it, or has it not"
    )
    net_device: NetDevice = allowed("auto")
    threads: int = allowed(1)
    warmup_events: int = allowed(50_000)
    ahead_bytes: int = free(64 << 20)
    publish_every_s: int = fixed(600, "versions are numbered by it")
    publish_budget: PublishBudget | None = fixed(
        None, "the rows that it holds back lie in checkpoints from the start"
    )
    snapshot_every: int = allowed(6)
    full_snapshot_every: int = free(1)
    keep_snapshots: int = free(2)
    keep_snapshots_s: int = free(0)
    checkpoint_memory_bytes: int = free(1 << 30)
    cpu: str = fixed("x86-64-v3", "the folder's dense program is compiled for it")
    bus_bytes: int = free(512 << 20)
    devices: int = free(1)
    ddr_budget_bytes: int = free(4 << 30)
    ssd_budget_bytes: int = free(0)
    ssd_directory: str = free("")
    hold_bytes: int = free(0)
    hold_batches: int = free(0)
    hot_rows: int = free(0)
    most_set_aside: int = free(20)
    codecs: Codecs = dataclasses.field(default_factory=Codecs)
    sync: Sync = dataclasses.field(default_factory=AllReduce, metadata={CHANGE: ALLOWED})
    evaluation: EvalConfig = dataclasses.field(
        default_factory=EvalConfig,
        metadata=because("events that are held out must never have been learned from"),
    )

    def __post_init__(self) -> None:
        """Refuse counts below one."""
        object.__setattr__(self, "loss", name_of("loss", self.loss))
        counts = ("batch_size", "threads", "publish_every_s", "snapshot_every", "keep_snapshots")
        for name in (
            *counts,
            "full_snapshot_every",
            "devices",
            "checkpoint_memory_bytes",
            "warmup_events",
            "most_set_aside",
            "bus_bytes",
            "net_parts",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 < self.negative_rate <= 1:
            raise ValueError(
                f"negative_rate is {self.negative_rate}; give more than 0, at most 1, which is all"
            )
        late = self.labels is not None or self.negative_rate < 1
        if late and self.model.outputs > 1:
            raise ValueError(
                f"the model has {self.model.outputs} heads; labels that come late and negative_rate"
                " are for a model of one"
            )
        if self.loss != "bce" and ":" not in self.loss_name:
            raise ValueError(
                f"loss is {self.loss!r}; use 'bce', or a function of yours: itself, or as text"
                " package.module:name"
            )
        check_choice("net_dtype", self.net_dtype, NetDtype)
        check_choice("net_device", self.net_device, NetDevice)
        check_sync(self.sync)
        if self.full_snapshot_every > 1 and self.publish_budget is not None:
            raise ValueError(
                f"full_snapshot_every is {self.full_snapshot_every}, and publish_budget holds rows "
                "back, so that delta files do not lead to what is trained: leave one of them out"
            )
        names = [table.name for table in self.model.tables]
        for table in self.prune.tables if self.prune is not None else ():
            if table not in names:
                raise ValueError(f"prune names table {table!r}; there are {names}")
        self.evaluation.check({each.name: each.keys for each in self.model.features})
        if self.ahead_bytes < 0:
            raise ValueError(f"ahead_bytes is {self.ahead_bytes}; 0 reads between steps")
        if self.hot_rows < 0:
            raise ValueError(f"hot_rows is {self.hot_rows}; give 0, which is none, or more")
        if self.hot_rows > 0 and isinstance(self.sync, AsynchronousSync):
            raise ValueError(
                f"hot_rows is {self.hot_rows}, and the ranks of {type(self.sync).__name__} take no"
                " step together in which a row could change its rank: leave it out, or use"
                " AllReduce() or DCT()"
            )
        self._check_holds()

    def _check_holds(self) -> None:
        """Refuse a window that cannot be."""
        given, half = f"hold_bytes is {self.hold_bytes}", self.ddr_budget_bytes // 2
        if self.hold_bytes < 0 or not 0 <= self.hold_batches <= MAX_HELD_BATCHES:
            raise ValueError(
                f"{given}, hold_batches {self.hold_batches}; give 0 or more bytes, and 0 to"
                f" {MAX_HELD_BATCHES} batches"
            )
        if self.hold_bytes == 0:
            if self.hold_batches > 0:
                raise ValueError(
                    f"hold_batches is {self.hold_batches} and hold_bytes 0, which holds no rows:"
                    " give bytes, too"
                )
            return
        if self.ssd_budget_bytes == 0:
            raise ValueError(f"{given}, and without an SSD no row leaves DDR: leave it out")
        if self.hold_bytes > half:
            raise ValueError(
                f"{given}, more than half of ddr_budget_bytes: other rows need room, too; give at"
                f" most {half}, or more DDR"
            )
        if self.ahead_bytes == 0:
            raise ValueError(f"{given}, and ahead_bytes 0, which reads no batch ahead: give more")
        if self.labels is not None or self.negative_rate < 1:
            raise ValueError(
                f"{given}, and with late labels or negative_rate what is learned is known only when"
                " its turn has come: leave one of them out"
            )

    @property
    def loss_name(self) -> str:
        """The loss as text."""
        return name_of("loss", self.loss)
