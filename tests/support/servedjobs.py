"""The work of ranks in tests of rows that are served."""

import random
import time
from collections import defaultdict
from typing import Any

import numpy as np
from rankjobs import STEP

from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.sync.ranks import Ranks
from embertide.trainer.sync.row_server import RowServer

Sums = dict[tuple[int, int], float]


def served_sums(ranks: Ranks, max_staleness: int, batches: int) -> dict[str, Any]:
    """Learn nothing, but read rows and have gradients summed by their owners, with random pauses.

    Returns what this rank has sent, and what it has been sent, by table and key.
    """
    rows = EmbeddingStore(STEP.model, ranks=ranks, max_staleness=max_staleness)
    served = rows.served
    assert served is not None
    rng, pauses = np.random.default_rng(ranks.rank), random.Random(ranks.rank)
    came, sent = defaultdict[tuple[int, int], float](float), Sums()

    def step(bags: Any) -> None:
        time.sleep(pauses.random() * 1e-3)
        for t, keys, _, gradient_UD in bags:
            for key, gradient_D in zip(keys.tolist(), gradient_UD, strict=True):
                came[t, key] += float(gradient_D.sum())

    served.server = RowServer(max_staleness, rows._serve_rows, step)
    errors = list[Exception]()
    ranks.calls().serve(served.answers(), errors.append)
    for n in range(batches):
        served.batch = n * ranks.size + ranks.rank
        keys_TB = rng.integers(0, 40, (2, 16))
        asked = served.ask([(t, keys_B, None) for t, keys_B in enumerate(keys_TB)])
        served.rows(asked, lambda _: [])
        time.sleep(pauses.random() * 4e-3)
        if n % 7 == 6:
            served.release(asked)  # as of a batch that is not finite
            continue
        gradients = [np.full((16, table.dim), 1 + n, np.float32) for table in STEP.model.tables]
        served.give(asked, asked.routed.sum([(None, each) for each in gradients]))
        for t, keys_B in enumerate(keys_TB.tolist()):
            for key in keys_B:
                sent[t, key] = sent.get((t, key), 0.0) + (1 + n) * STEP.model.tables[t].dim
    ranks.calls().close()
    served.check(ranks.channel("check"))
    assert not errors
    return {"sent": sent, "came": dict(came), "stats": served.server.stats}
