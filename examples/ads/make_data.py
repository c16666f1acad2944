"""Writes four days of display ads in build/: Criteo's columns, with times, and clicks apart.

ads.parquet           three days: ts, label, I1 to I13 (counts), C1 to C26 (categories)
next_day.parquet      the fourth day, the same columns
impressions.parquet   the three days without the label, with an id: `impression`
clicks.parquet        the clicks on them as a stream of its own: ts, impression
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

DAYS = 4
START = 1_700_006_400  # a midnight
# Values of each category: sites, placements, campaigns, creatives, users' interests and so on.
SIZES = [1000, 500, 20_000, 8000, 300, 15, 9000, 400, 3, 12_000, 4000, 20_000, 3000]
SIZES += [26, 6000, 20_000, 10, 3000, 1500, 4, 20_000, 15, 12, 10_000, 60, 7000]


def generated(events: int, seed: int) -> pa.Table:
    """Make events whose clicks depend on what their categories and counts are, in order of time."""
    rng = np.random.default_rng(seed)
    logit_B = np.zeros(events)
    columns: dict[str, object] = {}
    for i in range(13):
        count_B = rng.lognormal(1 + i / 6, 1.2, events)
        logit_B += 0.12 * rng.choice([-1, 1]) * np.log1p(count_B) * (i < 6)
        # A count that is not known is null; most of I12 is not.
        known_B = rng.random(events) > (0.75 if i == 11 else 0.1)
        columns[f"I{i + 1}"] = pa.array(count_B.astype(np.int64), mask=~known_B)
    for i, size in enumerate(SIZES):
        # Few values have most events, and new values come all the time, as new campaigns do.
        rank_B = np.minimum(rng.zipf(1.25, events) - 1, size - 1)
        value_B = (rank_B + (np.arange(events) * size // events // 4) * (size > 5000)) % size
        effect = rng.normal(0, 0.45, size)
        logit_B += effect[value_B] * (i % 3 != 1)
        columns[f"C{i + 1}"] = value_B * 1_000_003 % (1 << 20)
    logit_B -= logit_B.mean() + 1.7
    label_B = rng.random(events) < 1 / (1 + np.exp(-logit_B))
    return pa.table({"label": label_B.astype(np.int8), **columns})


def main() -> None:
    """Write the files."""
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--events", type=int, default=60_000)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument(
        "--criteo", help="Criteo's display ads as Parquet, to take the rows of; times are made up"
    )
    asked = words.parse_args()
    rng = np.random.default_rng(asked.seed)
    if asked.criteo is None:
        table = generated(asked.events, asked.seed)
    else:
        names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
        table = pq.read_table(asked.criteo, columns=names).slice(0, asked.events)
    ts_B = START + np.arange(len(table)) * DAYS * 86_400 // len(table)
    table = table.add_column(0, "ts", pa.array(ts_B))
    build = Path("build")
    build.mkdir(exist_ok=True)
    today = pc.less(table["ts"], START + (DAYS - 1) * 86_400)
    days = table.filter(today)
    pq.write_table(days, build / "ads.parquet")
    pq.write_table(table.filter(pc.invert(today)), build / "next_day.parquet")
    impressions = days.drop_columns(["label"])
    impression_B = np.arange(len(days))
    pq.write_table(
        impressions.append_column("impression", pa.array(impression_B)),
        build / "impressions.parquet",
    )
    clicked_B = days["label"].to_numpy() > 0
    # Half of the clicks come within two minutes, and one in forty after half an hour.
    delay_B = rng.lognormal(np.log(120), 1.4, len(days)).astype(np.int64)
    clicks = {
        "ts": (days["ts"].to_numpy() + delay_B)[clicked_B],
        "impression": impression_B[clicked_B],
    }
    pq.write_table(pa.table(clicks).sort_by("ts"), build / "clicks.parquet")
    print(f"{len(days):,} impressions of three days, {clicked_B.sum():,} clicks, in {build}/")


main()
