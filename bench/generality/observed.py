"""`embertide train`, its scores kept: `python -m bench.generality.observed SCORES.npz train ...`.

Each event's score is that which the run's own figures are made of, from before it was learned.
"""

import sys
from typing import Any

import numpy as np

from embertide.trainer.__main__ import app
from embertide.trainer.eval.prequential import Prequential


def main() -> None:
    """Run the trainer's command; write what was scored when it ends."""
    path, *words = sys.argv[1:]
    parts: list[tuple[Any, Any]] = []
    add = Prequential.add

    def noted(self: Prequential, ts_ms_B: Any, label_B: Any, score_B: Any) -> None:
        parts.append((np.array(label_B), np.array(score_B)))
        add(self, ts_ms_B, label_B, score_B)

    Prequential.add = noted  # type: ignore[method-assign]
    try:
        app(words, prog_name="embertide")
    finally:
        label_N, score_N = (np.concatenate(each) for each in zip(*parts, strict=True))
        np.savez(path, label_N=label_N, score_N=score_N)


if __name__ == "__main__":
    main()
