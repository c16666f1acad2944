"""How a run's net is to be served: in bf16, within bounds."""

import dataclasses
import math

from embertide.trainer.config.changes import allowed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bf16Config:
    """When nodes may compute the dense net in bf16: what it costs on the run's own last day.

    A version is computed so only while both bounds hold, and else in fp32 (eval/precision.py).

    Attributes:
        max_auc_loss: The AUC that may be lost.
        max_error: The most that a score may differ from that in fp32.
        min_events: The fewest events of the last day to measure both on; one batch of sixteen is
            scored in both ways.
    """

    max_auc_loss: float = allowed(0.0005)
    max_error: float = allowed(0.01)
    min_events: int = allowed(5_000)

    def __post_init__(self) -> None:
        """Refuse bounds that bound nothing."""
        for name in ("max_auc_loss", "max_error"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"serve_bf16: {name} is {getattr(self, name)}; give a number above 0"
                )
        if self.min_events < 1:
            raise ValueError(f"serve_bf16: min_events is {self.min_events}; give 1 or more")
