"""How a run's net is to be served: in reduced precision, within bounds."""

import dataclasses
import math
from typing import Literal

from embertide.trainer.config.changes import allowed, fixed
from embertide.trainer.config.choices import check_choice

ReducedType = Literal["bf16", "int8"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReducedConfig:
    """When nodes may multiply in less than fp32: what it costs on the run's own last day.

    A version is computed so only while both bounds hold, and else in fp32 (eval/precision.py).

    Attributes:
        type: The type in which the dense net's larger layers multiply: "bf16", on CPUs with
            AVX512-BF16 or AMX; or "int8", on those with AVX512-VNNI, AVX-VNNI or AMX, which is
            faster and errs more.
        max_auc_loss: The AUC that may be lost.
        max_error: The most that a score may differ from that in fp32.
        min_events: The fewest events of the last day to measure both on; one batch of sixteen is
            scored in both ways.
    """

    type: ReducedType = fixed("bf16", "the folder's dense program is in it")
    max_auc_loss: float = allowed(0.0005)
    max_error: float = allowed(0.01)
    min_events: int = allowed(5_000)

    def __post_init__(self) -> None:
        """Refuse types that do not exist, and bounds that bound nothing."""
        check_choice("serve_reduced: type", self.type, ReducedType)
        for name in ("max_auc_loss", "max_error"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"serve_reduced: {name} is {getattr(self, name)}; give a number above 0"
                )
        if self.min_events < 1:
            raise ValueError(f"serve_reduced: min_events is {self.min_events}; give 1 or more")
