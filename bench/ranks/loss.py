"""The loss of a news model that ranks learn, batch by batch, and where a run of them ends.

    torchrun --standalone --nproc-per-node 2 -m bench.ranks.loss -- --seed 1

It prints one JSON line. The stream is made up, so it needs no file.
"""

import argparse
import dataclasses
import hashlib
import json

import numpy as np
import torch

from bench.train.quality import DLRM
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.model.learner import Learner
from embertide.trainer.sync.ranks import Ranks

_STREAM = NewsConfig(hours=24, views_per_hour=8_000, users=20_000)
_EVENTS_A_POINT = 10_000


def _digest(learner: Learner, ranks: Ranks) -> str:
    """Return a hash of the net and of all rows, whichever rank has them."""
    mine = [
        [table.name, bucket, hashlib.sha256(records).hexdigest()]
        for table, bucket, records in learner.rows.buckets()
    ]
    rows = sorted(each for of_rank in ranks.channel("bench").gather(mine) for each in of_rank)
    net = [each.tolist() for each in learner.net.state_dict().values()]
    return hashlib.sha256(json.dumps([rows, net]).encode()).hexdigest()


def measure(ranks: Ranks, seed: int) -> dict[str, object]:
    """Learn the stream; return what the program prints."""
    learner = Learner(dataclasses.replace(DLRM, seed=seed), ranks)
    points: list[float] = []
    total, events = 0.0, 0
    for batch in NewsSource(_STREAM).batches(batch_size=DLRM.batch_size):
        score_B = np.clip(learner.learn(batch).astype(np.float64), 1e-7, 1 - 1e-7)
        total -= float(np.log(np.where(batch.label_B > 0, score_B, 1 - score_B)).sum())
        events += len(batch)
        if events >= _EVENTS_A_POINT:
            points.append(total / events)
            total, events = 0.0, 0
            learner.rows.forget_changes()
    return {
        "seed": seed,
        "ranks": ranks.size,
        "events_a_point": _EVENTS_A_POINT,
        "loss": points,
        "digest": _digest(learner, ranks),
    }


def main() -> None:
    """Run as a rank that torchrun started, or alone."""
    parser = argparse.ArgumentParser(prog="bench.ranks.loss", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ranks = Ranks.join()
    found = measure(ranks, arguments.seed)
    if ranks.first:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
