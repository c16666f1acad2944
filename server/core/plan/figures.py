"""The cost of a plan for the whole fleet, in the figures that people and decisions go by."""

import dataclasses

from embertide.v1 import control_pb2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The cost of a plan for the whole fleet.

    Attributes:
        busiest_us: Time a second that the busiest device spends.
        mean_us: Mean over the devices.
        asked_keys: Keys a second that are asked of peers.
        value: The figure that plans are compared by: the scores of the groups added up.
    """

    busiest_us: float = 0.0
    mean_us: float = 0.0
    asked_keys: float = 0.0
    value: float = 0.0

    def message(self) -> control_pb2.PlanCost:
        """Write it."""
        return control_pb2.PlanCost(
            busiest_us=self.busiest_us, mean_us=self.mean_us, asked_keys=self.asked_keys
        )
