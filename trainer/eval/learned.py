"""A window of events, learned as `train` learns it and published by nobody: what trials do."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.data.base import Batch, EventSource
from embertide.trainer.data.limit import blocks
from embertide.trainer.model.learner import Learner


def learned(
    learner: Learner, source: EventSource, *, start: int = 0
) -> Iterator[tuple[Batch, NDArray[np.float32]]]:
    """Learn the events of a source, and yield each batch with its scores from before.

    Versions end where those of a run would, so that counts are as of the last one.

    Args:
        learner: The learner; its transforms are fitted to the first events.
        source: The events, with the columns that the model's are made from.
        start: Index of the first event.

    Raises:
        DataError: As the source.
        NotFiniteError: A batch would make the net not finite.
    """
    origin_ms: int | None = None
    version = 0
    every_ms = learner.run.publish_every_s * 1000
    batches = source.batches(batch_size=learner.run.batch_size, start=start)
    for batch in learner.warm_up(batches):
        origin_ms = int(batch.ts_ms_B[0]) if origin_ms is None else origin_ms
        for at, part in blocks(batch, origin_ms=origin_ms, every_ms=every_ms):
            if at != version:
                learner.refresh(origin_ms + at * every_ms - 1)
                learner.rows.forget_changes()
                version = at
            yield part, learner.learn(part)
