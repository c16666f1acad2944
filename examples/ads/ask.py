"""Asks for the chances of a click on the first impressions of the next day, from any node named."""

import sys

import pyarrow.parquet as pq

import embertide

nodes = sys.argv[1:] or ["127.0.0.1:8001"]
ads = pq.read_table("build/next_day.parquet").slice(0, 1000)
ads = ads.rename_columns([name.lower() for name in ads.column_names])
with embertide.Client(nodes, timeout_s=10) as client:
    answer = client.rank("ads", ads)
mean = answer.scores.to_numpy().mean()
print(f"version {answer.version}: {len(ads):,} ads, mean chance of a click {mean:.6f}")
