"""Profiles of steps that are drawn or assumed, not measured: tiny ones, and ones of Criteo 1TB."""

import random

from embertide.trainer.sync.placing.profile import (
    LayerProfile,
    Profile,
    RankProfile,
    TableProfile,
    WorkProfile,
)

# Rows of Criteo 1TB's tables, as MLPerf's DLRM has them.
_ROWS = (
    *(39_884_406, 39_043, 17_289, 7_420, 20_263, 3, 7_120, 1_543, 63, 38_532_951, 2_953_546),
    *(403_346, 10, 2_208, 11_938, 155, 4, 976, 14, 39_979_771, 25_641_295, 39_664_984, 585_935),
    *(12_972, 108, 36),
)
_DIM = 128
_LARGEST_BUCKETS = 256
# Parameters of MLPerf's DLRM, by layer; the rows enter at the fourth.
_LAYERS = (13 * 512, 512 * 256, 256 * 128, 479 * 1024, 1024 * 1024, 1024 * 512, 512 * 256, 256)
_ROWS_ENTER = 3
_FLOP_S = 70e9  # of one core over this project's Criteo net

WORK = WorkProfile(
    step_s=2e-4,
    route_s=10e-9,
    lookup_s=20e-9,
    pool_s=10e-9,
    give_s=15e-9,
    update_s=40e-9,
    adam_s=0.5e-9,
    select_s=1e-9,
    codec_s={"fp16": 0.2e-9, "bf16": 0.2e-9, "int8": 0.4e-9},
)


def _distinct(rows: int, events: float) -> float:
    """Return the distinct keys of some events, about as keys of a Zipf law repeat."""
    return float(max(1.0, min(rows * (1 - (1 - 1 / rows) ** events), events**0.85)))


def _load(chance: random.Random, buckets: int, skew: float) -> tuple[float, ...]:
    shares = [(1 + n) ** -skew for n in range(buckets)]
    chance.shuffle(shares)
    return tuple(share / sum(shares) for share in shares)


def criteo(
    seed: int,
    ranks: int,
    *,
    events: int = 65_536,
    gbit_per_s: float = 10.0,
    slow_cores: int = 0,
    slow_links: int = 0,
    skew: float = 0.3,
) -> Profile:
    """Return an assumed profile of Criteo 1TB's tables.

    Args:
        seed: Seed of the loads of buckets, and of which ranks are slow.
        ranks: The number of ranks.
        events: Events of a batch.
        gbit_per_s: Bandwidth of a link.
        slow_cores: Ranks whose cores take twice as long.
        slow_links: Ranks whose links have a fifth.
        skew: Skew of the loads of buckets; 0: even.
    """
    chance = random.Random(seed)
    order = chance.sample(range(ranks), ranks)
    parts = sorted({events / count for count in (1, 2, 4, 8, 16, 32)})
    tables = tuple(
        TableProfile(
            name=f"c{t}",
            row_floats=_DIM,
            gradient_floats=_DIM,
            row_bytes=_DIM * 4 + 24,
            rows=rows,
            keys=1,
            distinct=tuple((part, _distinct(rows, part)) for part in parts),
            load_P=_load(chance, _buckets(rows), skew),
        )
        for t, rows in enumerate(_ROWS)
    )
    # Sixteen cores a rank learn; the figures above are of one.
    net_s = 2 / (_FLOP_S * 16)
    layers = tuple(
        LayerProfile(
            name=f"l{n}", parameters=size, forward_s=size * net_s, backward_s=2 * size * net_s
        )
        for n, size in enumerate(_LAYERS)
    )
    links = [
        gbit_per_s * 1e9 / 8 / (5 if rank in order[:slow_links] else 1) for rank in range(ranks)
    ]
    return Profile(
        machine="assumed",
        cores=3,
        events=events,
        tables=tables,
        layers=layers,
        rows_enter=_ROWS_ENTER,
        ranks=tuple(
            RankProfile(
                pace=2.0 if rank in order[ranks - slow_cores :] else 1.0,
                bytes_per_s=link,
                latency_s=25e-6,
                sum_bytes_per_s=0.9 * link,
            )
            for rank, link in enumerate(links)
        ),
        work=WORK,
        budget_bytes=1 << 40,
    )


def _buckets(rows: int) -> int:
    """Return the buckets of a table: one for each 10^5 rows, up to a bound."""
    return min(_LARGEST_BUCKETS, 1 << max(0, (rows // 100_000).bit_length()))


def tiny(seed: int) -> Profile:
    """Return one of two or three ranks, and so few buckets that all strategies can be timed."""
    chance = random.Random(seed)
    ranks = chance.choice((2, 2, 3))
    tables = tuple(
        TableProfile(
            name=f"t{t}",
            row_floats=(width := chance.choice((4, 16, 64, 128))),
            gradient_floats=width,
            row_bytes=4 * width + 24,
            rows=(rows := chance.choice((10, 1000, 100_000))),
            keys=1,
            distinct=tuple((events, _distinct(rows, events)) for events in (64.0, 4096.0)),
            load_P=_load(chance, 1 if ranks == 3 else chance.choice((1, 2)), 1.0),
        )
        for t in range(3)
    )
    layers = tuple(
        LayerProfile(
            name=f"l{n}",
            parameters=chance.choice((1000, 100_000, 400_000)),
            forward_s=1e-7 * chance.random(),
            backward_s=2e-7 * chance.random(),
        )
        for n in range(3)
    )
    return Profile(
        machine="drawn",
        cores=chance.choice((1, 2, 3)),
        events=1024,
        tables=tables,
        layers=layers,
        rows_enter=1,
        ranks=tuple(
            RankProfile(
                pace=chance.choice((1.0, 1.0, 3.0)),
                bytes_per_s=chance.choice((1e8, 1e9)),
                latency_s=2e-5,
                sum_bytes_per_s=chance.choice((1e8, 1e9)),
            )
            for _ in range(ranks)
        ),
        work=WORK,
        budget_bytes=1 << 40,
    )
