"""A model that learns: its rows, its net, and a step of both for a batch of events.

Shapes: B events of a batch.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embertide.trainer.config import RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.model.build import build_net
from embertide.trainer.model.dlrm import Probability


class Learner:
    """The state of a run, but for its place in the stream. Used by one thread.

    Sets torch's threads and seed, which are the process's.
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
        return torch.sigmoid(logits_B.detach()).numpy()
