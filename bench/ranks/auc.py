"""AUC of a news model that ranks learn, each block scored with the weights of the block before.

    torchrun --standalone --nproc-per-node 2 -m bench.ranks.auc -- --data CLICKS --model dlrm

It prints one JSON line. Stream, days that count and models are those of bench.train.quality;
`pruned` is the model with counters, its rows kept to a twentieth of the bytes of all keys seen.
"""

import argparse
import dataclasses
import json
import time

import torch

from bench.train.quality import COUNTERS, DLRM
from embertide.trainer.config import Codec, Codecs, PruneConfig, RunConfig
from embertide.trainer.data import open_events
from embertide.trainer.data.base import EventSource
from embertide.trainer.data.history import with_columns
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.eval.blocks import BlockQuality
from embertide.trainer.model.learner import Learner
from embertide.trainer.sync.ranks import Ranks

_BLOCK_S = 1800
_DAYS = 4, 9
_RATIO = 20.0


def _runs() -> dict[str, RunConfig]:
    prune = PruneConfig(ratio=_RATIO)
    return {
        "dlrm": DLRM,
        "counters": COUNTERS,
        "pruned": dataclasses.replace(COUNTERS, prune=prune),
    }


def measure(
    ranks: Ranks, data: str, model: str, seed: int, codecs: Codecs, events: int | None
) -> dict[str, object]:
    """Learn the stream; return what the program prints."""
    run = dataclasses.replace(_runs()[model], seed=seed, codecs=codecs)
    source: EventSource = open_events(data)
    if events is not None:
        source = FirstEvents(source, events)
    learner = Learner(run, ranks)
    began = time.monotonic()
    quality = BlockQuality(learner, with_columns(source, run.model), seen_by="cand")
    most = 0

    def after(_block: int) -> None:
        nonlocal most
        learner.rows.forget_changes()
        stats = learner.rows.stats()
        most = max(most, stats["ddr_payload_bytes"] + stats["index_bytes"])

    quality.run(block_s=_BLOCK_S, batch_size=run.batch_size, after_block=after)
    days = _DAYS if events is None else (0, 0)
    sent = {kind: [each.messages, each.bytes] for kind, each in ranks.traffic.items()}
    said = ranks.channel("bench").gather([most, learner.rows.stats()["rows"], sent])
    return {
        "model": model,
        "seed": seed,
        "ranks": ranks.size,
        "codecs": dataclasses.asdict(codecs),
        "auc": quality.all.mean_daily(*days),
        "events": sum(each.events for each in quality.all.daily_summaries().values()),
        "columns": len(run.model.columns),
        "bytes": sum(bytes_ for bytes_, _, _ in said),
        "rows": sum(rows for _, rows, _ in said),
        "sent": [kinds for _, _, kinds in said],
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    """Run as a rank that torchrun started, or alone."""
    parser = argparse.ArgumentParser(prog="bench.ranks.auc", description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", choices=list(_runs()), default="dlrm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", default="fp32", help="codec of rows")
    parser.add_argument("--gradients", default="fp32", help="codec of gradients")
    parser.add_argument("--events", type=int, help="the first so many alone")
    arguments = parser.parse_args()
    rows: Codec = arguments.rows
    gradients: Codec = arguments.gradients
    torch.set_num_threads(1)
    ranks = Ranks.join()
    codecs = Codecs(rows=rows, gradients=gradients)
    found = measure(
        ranks, arguments.data, arguments.model, arguments.seed, codecs, arguments.events
    )
    if ranks.first:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
