"""The detectors: what the fleet's demand looks like now, and which of it has changed.

Each signal is compared with a reference, that of the last time a planner was asked. A signal that
has moved by more than its threshold fires; the next reference is taken then. So a signal that stays
where it is fires once, and noise below the threshold never does.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from embertide.server.core.plan.cost import busy_us_D
from embertide.server.core.plan.instance import Floats, Instance, Ints, rates
from embertide.server.core.plan.prices import Prices
from embertide.v1 import control_pb2, node_pb2

HOT_SET = 100  # keys that are compared, at most
# A key is hot if it has this share of all reads. Where reads are even, no key is: which ones come
# out on top there is chance, and tells nothing.
HOT_SHARE = 1 / 2000
_HOT_MIN = 10  # keys; fewer are not compared
HotSet = frozenset[tuple[int, int]]  # (table id, key)


class Signals(NamedTuple):
    """Signals that the detectors see; as DriftSignals in control.proto."""

    skew: float = 1.0
    remote_share: float = 0.0
    copy_share: float = 0.0
    ssd_share: float = 0.0
    hot_set_overlap: float = 1.0
    forecast_error: float = 0.0
    mix_change: float = 0.0

    def message(self) -> control_pb2.DriftSignals:
        """Write them."""
        return control_pb2.DriftSignals(**self._asdict())


# By how much a signal must differ from its reference. Measured on the news file and on synthetic
# streams (docs/design/0014): sampling noise of a 10-minute half-life stays below a third of each.
THRESHOLDS = Signals(
    skew=0.10,
    remote_share=0.05,
    copy_share=0.10,
    ssd_share=0.02,
    hot_set_overlap=0.50,
    forecast_error=0.15,
    mix_change=0.10,
)


def hot_set(loads: Iterable[node_pb2.NodeServiceGetLoadResponse]) -> HotSet:
    """Return the hottest keys over all nodes; none where no key is hot."""
    reads: dict[tuple[int, int], int] = {}
    total = 0
    for load in loads:
        total += sum(each.reads + each.asked + each.hot_reads for each in load.buckets)
        for key in load.hot_keys:
            name = key.table_id, key.key
            reads[name] = reads.get(name, 0) + key.reads - key.error
    hot = [name for name, count in reads.items() if count >= max(1, total * HOT_SHARE)]
    return frozenset(sorted(hot, key=lambda name: (-reads[name], name))[:HOT_SET])


def overlap(now: HotSet, then: HotSet | None) -> float:
    """Return the share of the hottest keys now that were hottest then.

    1 without a reference, or where too few keys are hot to tell.
    """
    if then is None or min(len(now), len(then)) < _HOT_MIN:
        return 1.0
    return len(now & then) / len(now)


def mix_of(wanted_NB: Floats, starts_T: Ints) -> Floats:
    """Return the share of all reads that each node wants of each table: [N,T].

    Args:
        wanted_NB: Keys a second, by node and bucket.
        starts_T: Position of each table's first bucket.
    """
    wanted_NT = np.add.reduceat(wanted_NB, starts_T, axis=1)
    mix_NT: Floats = wanted_NT / max(float(wanted_NT.sum()), 1e-9)
    return mix_NT


def distance(now_NT: Floats, then_NT: Floats | None) -> float:
    """Return the total variation distance of two mixes; 0 without a reference of the same fleet."""
    if then_NT is None or then_NT.shape != now_NT.shape:
        return 0.0
    return float(np.abs(now_NT - then_NT).sum() / 2)


def observe(instances: Sequence[Instance], prices: Prices) -> Signals:
    """Return the signals that follow from the demand; the other ones are at their defaults."""
    skews = [1.0]
    wanted = asked = copied = on_ssd = looked_up = 0.0
    for instance in instances:
        busy_D = busy_us_D(instance, instance.owned_DB, prices)[instance.open_D]
        if len(busy_D) and busy_D.mean() > 0:
            skews.append(float(busy_D.max() / busy_D.mean()))
        now = rates(instance, instance.owned_DB)
        wanted += float(instance.wanted_NB.sum())
        asked += float(now.asked_NT.sum())
        copied += float(now.copied_NT.sum())
        reads_T = (now.here_DT + now.for_peers_DT).sum(axis=0)
        looked_up += float(reads_T.sum())
        on_ssd += float(reads_T @ np.array([table.tier_share[2] for table in instance.tables]))
    return Signals(
        skew=max(skews),
        remote_share=asked / wanted if wanted else 0.0,
        copy_share=copied / (copied + asked) if copied + asked else 0.0,
        ssd_share=on_ssd / looked_up if looked_up else 0.0,
    )


def fired(now: Signals, reference: Signals | None) -> tuple[str, ...]:
    """Return the names of the signals that have moved past their thresholds."""
    if reference is None:
        return ("first_look",)
    moved = {name: abs(getattr(now, name) - getattr(reference, name)) for name in Signals._fields}
    # These are differences from the reference already.
    moved["hot_set_overlap"] = 1 - now.hot_set_overlap
    moved["mix_change"] = now.mix_change
    return tuple(name for name in Signals._fields if moved[name] > getattr(THRESHOLDS, name))
