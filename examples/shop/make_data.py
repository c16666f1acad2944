"""Writes sessions of a shop in build/: what visitors were shown after what they had looked at.

views.csv       four days: ts, visitor, hour, device, seen (items, newest first), and of each item
                shown: item, category, price, clicked
last_day.csv    the fifth day, the same columns
items.csv       the shop's items: item, category, price
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

START = 1_700_006_400  # a midnight
DAYS, ITEMS, CATEGORIES, SHELF, SEEN = 5, 1000, 25, 10, 5
VISITORS = 800


def views(sessions: int, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    """Yield the items that were shown, view by view, a shelf of them at one time."""
    place = rng.normal(size=(ITEMS, 6))  # alike items lie near one another
    category_I = (place @ rng.normal(size=(6, CATEGORIES))).argmax(axis=1)
    price_I = np.round(rng.lognormal(3, 0.7, ITEMS), 2)
    with Path("build/items.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["item", "category", "price"])
        rows.writerows(zip(range(ITEMS), category_I, price_I, strict=True))
    popular_I = rng.normal(0, 0.6, ITEMS)
    times = np.sort(rng.integers(0, DAYS * 86_400 - 3600, sessions))
    at: list[tuple[int, list[tuple[Any, ...]]]] = []
    for session, began in enumerate(times.tolist()):
        # Popularity drifts: each day a tenth of the items trade places.
        if session % max(1, sessions // (DAYS * 10)) == 0:
            some = rng.integers(0, ITEMS, ITEMS // 100)
            popular_I[some] = rng.normal(0, 0.6, len(some))
        visitor = int(rng.integers(VISITORS))
        device, cheap = visitor % 3, (visitor % 7 - 3) / 8
        seen = [int(rng.integers(ITEMS))]
        for step in range(1 + rng.geometric(0.25)):
            taste = place[seen[:SEEN]].mean(axis=0)
            # Half of a shelf is near what was seen, the rest is anything.
            near = np.argpartition(-(place @ taste), 60)[:60]
            half = rng.choice(near, SHELF // 2, replace=False)
            shelf = np.unique(np.concatenate([half, rng.integers(0, ITEMS, SHELF)]))
            shelf = rng.permutation(shelf)[:SHELF]
            pull = place[shelf] @ taste * 0.7 + popular_I[shelf] - cheap * np.log(price_I[shelf])
            chance = np.exp(pull - pull.max())
            clicked = int(rng.choice(len(shelf), p=chance / chance.sum()))
            ts = START + began + 40 * step
            context = (ts, visitor, ts // 3600 % 24, device, "|".join(map(str, seen[:SEEN])))
            rows_of_view = [
                (*context, item, category_I[item], price_I[item], int(n == clicked))
                for n, item in enumerate(shelf.tolist())
            ]
            at.append((ts, rows_of_view))
            seen.insert(0, int(shelf[clicked]))
    for _, shown in sorted(at, key=lambda view: view[0]):
        yield from shown


def main() -> None:
    """Write the files."""
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--sessions", type=int, default=2500)
    words.add_argument("--seed", type=int, default=1)
    asked = words.parse_args()
    Path("build").mkdir(exist_ok=True)
    header = ["ts", "visitor", "hour", "device", "seen", "item", "category", "price", "clicked"]
    last = START + (DAYS - 1) * 86_400
    paths = (Path("build/views.csv"), Path("build/last_day.csv"))
    with paths[0].open("w", newline="") as days, paths[1].open("w", newline="") as last_day:
        files = csv.writer(days), csv.writer(last_day)
        for file in files:
            file.writerow(header)
        counts = [0, 0]
        for row in views(asked.sessions, np.random.default_rng(asked.seed)):
            late = row[0] >= last
            files[late].writerow(row)
            counts[late] += 1
    print(f"{counts[0]:,} items shown in four days, {counts[1]:,} on the last, in build/")


main()
