"""A model that learns: its rows, its net, and a step of both for a batch of events.

Shapes: B events of a batch.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embertide.trainer.config import RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.embedding.counters import Counters
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.model.build import build_net
from embertide.trainer.model.dlrm import Probability
from embertide.trainer.model.layers import Columns


class Learner:
    """The state of a run, but for its place in the stream. Used by one thread.

    Sets torch's threads and seed, which are the process's.

    Attributes:
        origin_ms: Time that counts are reckoned from: the first event's, unless it is set before.
    """

    def __init__(self, run: RunConfig) -> None:
        """Open the store and make the net, both as the run's seed says."""
        torch.set_num_threads(run.threads)
        torch.manual_seed(run.seed)
        self.net = build_net(run.model)
        self.served = Probability(self.net)
        self.rows = EmbeddingStore(
            run.model,
            optimizer=run.optimizer,
            seed=run.seed,
            devices=run.devices,
            ddr_budget_bytes=run.ddr_budget_bytes,
            ssd_budget_bytes=run.ssd_budget_bytes,
            ssd_directory=run.ssd_directory,
            prune=run.prune,
        )
        self.optimizer = torch.optim.Adam(
            self.net.parameters(), lr=run.optimizer.dense_learning_rate
        )
        self.origin_ms: int | None = None
        self.counters = Counters(run.model)
        self._loss = nn.BCEWithLogitsLoss()

    def score(self, batch: Batch) -> NDArray[np.float32]:
        """Return score_B in (0, 1); nothing changes."""
        with torch.no_grad():
            scores_B: Tensor = self.served(
                torch.from_numpy(batch.dense_BD), self.rows(batch.keys_BF)
            )
        return scores_B.numpy()

    def learn(self, batch: Batch) -> NDArray[np.float32]:
        """Take a step and return the score_B from before it."""
        self.optimizer.zero_grad()
        label_B = torch.from_numpy(batch.label_B)
        logits_B: Tensor = self.net(torch.from_numpy(batch.dense_BD), self.rows(batch.keys_BF))
        self._loss(logits_B, label_B).backward()
        self.optimizer.step()
        self.rows.step()
        if self.origin_ms is None:
            self.origin_ms = int(batch.ts_ms_B[0])
        self.counters.add(batch, self.origin_ms)
        return torch.sigmoid(logits_B.detach()).numpy()

    def refresh(self, now_ms: int) -> None:
        """Bring all events learned into the counts that rows have, and the net sees as of now.

        To be called when a version ends, and not within one: so training sees the counts that
        serving gives between this version and the next.
        """
        if self.origin_ms is None:
            return
        self.counters.flush(self.rows.store, self.origin_ms)
        for module in self.net.modules():
            if isinstance(module, Columns):
                module.set_now((now_ms - self.origin_ms) / 1000)
