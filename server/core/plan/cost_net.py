"""A learned cost of shards: small networks that numpy evaluates; torch trains them in bench/drift.

Two networks, as in NeuroShard. The compute network turns each table's shard on a device into a
vector, adds these up and turns the sum into a time: so that a device's cost need not be the sum of
its tables' costs, and changing one table changes one term. The link network turns what a device
sends and receives into a time. Both times are in multiples of the unit that `ShardCosts` scales by.

Letters of shapes: X whatever is evaluated at once, F features, E elements of a shard's vector.
"""

import dataclasses
import functools
import importlib.resources
from collections.abc import Sequence
from typing import IO

import numpy as np
from numpy.typing import NDArray

Singles = NDArray[np.float32]
Layers = Sequence[tuple[Singles, Singles]]  # weights, in x out, and bias

# The order of a shard's features: bytes read, index lines read, row bytes, share of the table's
# reads, logarithm of its resident bytes, keys a bag.
FEATURES = 6
WEIGHTS = "cost_net.npz"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CostNet:
    """The layers of both networks; a ReLU between layers.

    Attributes:
        shard: From a shard's features to its vector.
        device: From the sum of the vectors to the unit time of lookups.
        link: From bytes sent and received, in units, to the unit time of communication.
        us_per_byte: Time of a unit, per byte of it, on the machine that the nets were trained for.
    """

    shard: Layers
    device: Layers
    link: Layers
    us_per_byte: float

    @property
    def width(self) -> int:
        """Elements of a shard's vector."""
        return len(self.shard[-1][1])

    def vectors(self, features_XF: Singles) -> Singles:
        """Return the vectors of shards; one that is not read has zeros."""
        vectors_XE = _forward(self.shard, features_XF)
        vectors_XE[features_XF[..., 0] <= 0] = 0
        return vectors_XE

    def costs(self, sums_XE: Singles, traffic_X2: Singles) -> Singles:
        """Return the time of devices: lookups and communication."""
        compute_X = _forward(self.device, sums_XE)[..., 0]
        costs: Singles = compute_X + _forward(self.link, traffic_X2)[..., 0]
        return costs


def _forward(layers: Layers, values_XF: Singles) -> Singles:
    shape = values_XF.shape[:-1]
    values = values_XF.reshape(-1, values_XF.shape[-1])
    for at, (weights, bias) in enumerate(layers):
        values = values @ weights
        values += bias
        if at < len(layers) - 1:
            np.maximum(values, 0, out=values)
    return values.reshape(*shape, -1)


def save(net: CostNet, file: IO[bytes]) -> None:
    """Write a net, as `load` reads it."""
    arrays: dict[str, NDArray[np.float32]] = {}
    for name in ("shard", "device", "link"):
        for at, (weights, bias) in enumerate(getattr(net, name)):
            arrays[f"{name}.{at}.weights"], arrays[f"{name}.{at}.bias"] = weights, bias
    np.savez(file, us_per_byte=np.float64(net.us_per_byte), **arrays)


def load(file: IO[bytes]) -> CostNet:
    """Read a net."""
    with np.load(file, allow_pickle=False) as arrays:

        def layers(name: str) -> Layers:
            count = sum(key.startswith(f"{name}.") for key in arrays) // 2
            return [
                (arrays[f"{name}.{at}.weights"], arrays[f"{name}.{at}.bias"]) for at in range(count)
            ]

        return CostNet(
            shard=layers("shard"),
            device=layers("device"),
            link=layers("link"),
            us_per_byte=float(arrays["us_per_byte"]),
        )


@functools.cache
def shipped() -> CostNet:
    """Return the net that comes with the package."""
    with importlib.resources.files(__package__).joinpath(WEIGHTS).open("rb") as file:
        return load(file)
