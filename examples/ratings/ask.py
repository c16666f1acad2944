"""Ranks all films that were rated for one user, at any node named, and shows the best."""

import sys

import numpy as np
import pyarrow.compute as pc
import pyarrow.csv

import embertide

nodes = sys.argv[1:] or ["127.0.0.1:8001"]
ratings = pyarrow.csv.read_csv("build/last_year.csv")
films = pc.unique(ratings["movieId"]).to_numpy()
user = ratings["userId"][-1].as_py()
with embertide.Client(nodes, timeout_s=10) as client:
    answer = client.rank("ratings", {"movie_id": films}, context={"user_id": user})
print(f"version {answer.version}: user {user}, {len(films):,} films")
for best in np.argsort(-answer.scores)[:5]:
    print(f"film {films[best]:4}  {answer.scores[best]:.4f}")
