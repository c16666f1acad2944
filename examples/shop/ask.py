"""Ranks all items of the shop for one visitor, in one call, and shows the best."""

import sys

import numpy as np
import pyarrow.csv

import embertide

nodes = sys.argv[1:] or ["127.0.0.1:8001"]
items = pyarrow.csv.read_csv("build/items.csv")
visitor = {"visitor": 17, "hour": 20, "device": 2, "seen": [3, 141, 59]}
with embertide.Client(nodes, timeout_s=10) as client:
    answer = client.rank("shop", items, context=visitor)
scores = answer.scores.to_numpy()
print(f"version {answer.version}: {len(items):,} items in {answer.requests} request(s)")
for best in np.argsort(-scores)[:5]:
    print(f"item {items['item'][best].as_py():4}  {scores[best]:.4f}")
