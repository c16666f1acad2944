"""Quality as a reader of versions sees it: each block of the stream is scored, then learned.

A block of T minutes is scored with the weights of the end of the block before, as if a version were
published at each end and served at once. The shorter T, the fresher the model; nothing else than
staleness and learning is in the figure. Shapes: B events of a batch.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.data.base import Batch, EventSource
from embertide.trainer.data.limit import blocks
from embertide.trainer.eval.prequential import Prequential
from embertide.trainer.model.learner import Learner


class BlockQuality:
    """Scores and learns a stream block by block.

    Attributes:
        all: The figures of every event.
        repeated: Those of events whose key in the feature `seen_by` came before; a first one may
            tell its label by being first.
    """

    def __init__(self, learner: Learner, source: EventSource, *, seen_by: str) -> None:
        """Name the model and the events.

        Raises:
            ValueError: The source has no feature `seen_by`, or it is a list.
        """
        names = [feature.name for feature in source.schema.features]
        if seen_by not in names:
            raise ValueError(f"there is no feature {seen_by!r}; there are {', '.join(names)}")
        if source.schema.features[names.index(seen_by)].is_list:
            raise ValueError(f"feature {seen_by!r} is a list; name one of one key an event")
        self._learner = learner
        self._source = source
        self._column = names.index(seen_by)
        self._seen: set[int] = set()
        self.all = Prequential()
        self.repeated = Prequential()

    def run(
        self,
        *,
        block_s: int,
        batch_size: int,
        after_block: Callable[[int], None] = lambda _block: None,
    ) -> None:
        """Score and learn all events; a block's are held in memory.

        Counts are as of the end of the block before, too.

        Args:
            block_s: T, in seconds of event time.
            batch_size: Events of a step, at least.
            after_block: Called with the number of each block that was learned.

        Raises:
            DataError: As the source.
        """
        origin_ms: int | None = None
        every_ms = block_s * 1000
        current, parts = 0, list[Batch]()
        batches = self._learner.warm_up(self._source.batches(batch_size=batch_size))
        for batch in batches:
            origin_ms = int(batch.ts_ms_B[0]) if origin_ms is None else origin_ms
            for block, part in blocks(batch, origin_ms=origin_ms, every_ms=every_ms):
                if block != current:
                    self._block(parts)
                    self._learner.refresh(origin_ms + block * every_ms - 1)
                    after_block(current)
                    current, parts = block, []
                parts.append(part)
        self._block(parts)
        after_block(current)

    def _block(self, parts: list[Batch]) -> None:
        for part in parts:
            score_B = self._learner.score(part)
            self.all.add(part.ts_ms_B, part.label_B, score_B)
            again_B = self._again(part)
            self.repeated.add(part.ts_ms_B[again_B], part.label_B[again_B], score_B[again_B])
        for part in parts:
            self._learner.learn(part)

    def _again(self, part: Batch) -> NDArray[np.bool_]:
        """Whether each event's key was there in an earlier one."""
        keys = part.keys_BF[:, self._column].tolist()
        again = np.zeros(len(keys), np.bool_)
        for i, key in enumerate(keys):
            again[i] = key in self._seen
            self._seen.add(key)
        return again
