"""A learned cost of shards: small networks that numpy evaluates; torch trains them in bench/drift.

Two networks, as in NeuroShard. The compute network turns each table's shard on a device into a
vector, adds these up and turns the sum into a time. So the cost of a device need not be the sum of
the costs of its tables, yet changing one table changes only one term. The link network turns what a
device sends and receives into a time. Each has a linear part beside its hidden layer, and costs
nothing where nothing is done. Times are in multiples of the unit that `ShardCosts` scales by.

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
_APPENDED = 2
_LINEAR = ("device_linear_E", "link_linear_2")
WEIGHTS = "cost_net.npz"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CostNet:
    """The layers of both networks; a ReLU between layers.

    Attributes:
        shard: From a shard's features to its vector, to which the first two are appended.
        device: From the sum of the vectors to the unit time of lookups.
        device_linear_E: Addend for each element of the sum.
        link: From bytes sent and received, in units, to the unit time of communication.
        link_linear_2: Addend for each of the two.
        us_per_byte: Time of a unit, per byte of it, on the machine that the nets were trained for.
    """

    shard: Layers
    device: Layers
    device_linear_E: Singles
    link: Layers
    link_linear_2: Singles
    us_per_byte: float

    @property
    def width(self) -> int:
        """Elements of a shard's vector."""
        return len(self.device_linear_E)

    def vectors(self, features_XF: Singles) -> Singles:
        """Return the vectors of shards; one that is not read has zeros."""
        vectors_XE = np.concatenate(
            [_forward(self.shard, features_XF), features_XF[..., :_APPENDED]], axis=-1
        )
        vectors_XE[features_XF[..., 0] <= 0] = 0
        return vectors_XE

    def costs(self, sums_XE: Singles, traffic_X2: Singles) -> Singles:
        """Return the time of devices: lookups and communication."""
        costs: Singles = _from_nothing(self.device, sums_XE) + sums_XE @ self.device_linear_E
        costs += _from_nothing(self.link, traffic_X2) + traffic_X2 @ self.link_linear_2
        return costs


def _from_nothing(layers: Layers, values_XF: Singles) -> Singles:
    """Return by how much the output exceeds that for zeros."""
    nothing_1F = np.zeros((1, values_XF.shape[-1]), np.float32)
    exceeds_X: Singles = (_forward(layers, values_XF) - _forward(layers, nothing_1F))[..., 0]
    return exceeds_X


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
    arrays.update({name: getattr(net, name) for name in _LINEAR})
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
            **{name: arrays[name] for name in _LINEAR},
        )


@functools.cache
def shipped() -> CostNet:
    """Return the net that comes with the package."""
    with importlib.resources.files(__package__).joinpath(WEIGHTS).open("rb") as file:
        return load(file)
