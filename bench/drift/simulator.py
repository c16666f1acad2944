"""An independent judge of placements: the time that each device spends on a batch.

It scores table-wise, row-wise, column-wise and replicated placements by the same rules, and shares
no code with the planners' cost models, neither ours (server/core/plan) nor TorchRec's.

The rules. Every device receives an equal share of the batch. For each bag it reads the keys that it
owns itself; the other keys go to their owners. An owner adds up the rows of a bag that it owns and
returns one partial sum, if it owns any of them. Several owners of a part share the keys of those
that do not own it evenly. Then the time of a device is

* lookups, its own and those for others: row bytes and one more cache line a key (the index), at
  memory bandwidth;
* communication: the larger of what it sends and what it receives, at link bandwidth: 8 bytes a key
  asked and a vector of fp32 a partial sum.

The cost of a placement is the time of the busiest device. Letters of shapes: D devices, A devices
that ask, T tables.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

GIB = 2.0**30
KEY_BYTES, LINE_BYTES, ELEMENT_BYTES = 8, 64, 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The speeds of devices; constants are those of TorchRec's planner for hosts without GPUs."""

    memory_bytes_per_s: float = 51 * GIB
    link_bytes_per_s: float = 12.5 * GIB

    @property
    def memory_bytes_per_us(self) -> float:
        """Bytes read in a microsecond."""
        return self.memory_bytes_per_s / 1e6

    @property
    def link_bytes_per_us(self) -> float:
        """Bytes sent in a microsecond."""
        return self.link_bytes_per_s / 1e6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedTable:
    """A table whose bags are summed.

    Attributes:
        rows: Number of rows.
        dim: Elements of a row, fp32.
        pooling: Mean number of keys in a bag; one bag a sample.
    """

    rows: int
    dim: int
    pooling: float

    @property
    def bytes(self) -> int:
        """Resident size of the whole table."""
        return self.rows * self.dim * ELEMENT_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A part of a table and the devices that hold a copy of it.

    Attributes:
        key_share: Share of the table's reads that go to its rows.
        row_share: Share of the table's rows.
        devices: Those that hold it.
        columns: The range of elements, [begin, end).
    """

    key_share: float
    row_share: float
    devices: tuple[int, ...]
    columns: tuple[int, int]


Placement = Sequence[Sequence[Shard]]  # by table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The cost of a placement.

    Attributes:
        compute_us_D: Lookup time a batch.
        link_us_D: Communication time a batch.
        bytes_D: Resident bytes.
    """

    compute_us_D: Floats
    link_us_D: Floats
    bytes_D: Floats

    @property
    def busiest_us(self) -> float:
        """Time a batch of the busiest device."""
        return float((self.compute_us_D + self.link_us_D).max())

    @property
    def mean_us(self) -> float:
        """Mean over the devices."""
        return float((self.compute_us_D + self.link_us_D).mean())


def simulate(
    tables: Sequence[SimulatedTable],
    placement: Placement,
    devices: int,
    samples: int,
    machine: Machine | None = None,
) -> Outcome:
    """Return the outcome of a placement.

    Args:
        tables: The tables.
        placement: The shards of each; they must cover it.
        devices: Number of devices.
        samples: Samples of a batch that each device receives.
        machine: The speeds of devices.

    Raises:
        ValueError: Shards do not cover a table, or name a device that does not exist.
    """
    machine = machine or Machine()
    read_D, sent_D, received_D, bytes_D = (np.zeros(devices) for _ in range(4))
    for at, (table, shards) in enumerate(zip(tables, placement, strict=True)):
        _check(at, table, shards, devices)
        for shard in shards:
            width = shard.columns[1] - shard.columns[0]
            bytes_D[list(shard.devices)] += shard.row_share * table.rows * width * ELEMENT_BYTES
        for (begin, end), group in _by_columns(shards).items():
            vector_bytes = (end - begin) * ELEMENT_BYTES
            share_AD = _key_shares(group, devices)
            keys_AD = samples * table.pooling * share_AD
            read_D += keys_AD.sum(axis=0) * (vector_bytes + LINE_BYTES)
            np.fill_diagonal(keys_AD, 0.0)
            np.fill_diagonal(share_AD, 0.0)
            # A bag has a partial sum of an owner unless none of its keys are there.
            sums_AD = samples * (1 - (1 - np.minimum(share_AD, 1.0)) ** table.pooling)
            asked_AD, answered_AD = keys_AD * KEY_BYTES, sums_AD * vector_bytes
            sent_D += asked_AD.sum(axis=1) + answered_AD.sum(axis=0)
            received_D += asked_AD.sum(axis=0) + answered_AD.sum(axis=1)
    return Outcome(
        compute_us_D=read_D / machine.memory_bytes_per_us,
        link_us_D=np.maximum(sent_D, received_D) / machine.link_bytes_per_us,
        bytes_D=bytes_D,
    )


def _by_columns(shards: Sequence[Shard]) -> Mapping[tuple[int, int], list[Shard]]:
    groups: dict[tuple[int, int], list[Shard]] = {}
    for shard in shards:
        groups.setdefault(shard.columns, []).append(shard)
    return groups


def _key_shares(shards: Sequence[Shard], devices: int) -> Floats:
    """Return which share of an asker's keys of a table each device answers."""
    share_AD = np.zeros((devices, devices))
    for shard in shards:
        holds_D = np.zeros(devices, np.bool_)
        holds_D[list(shard.devices)] = True
        share_AD[holds_D, holds_D] += shard.key_share
        share_AD[~holds_D] += holds_D * shard.key_share / holds_D.sum()
    return share_AD


def _check(at: int, table: SimulatedTable, shards: Sequence[Shard], devices: int) -> None:
    """Prove that shards cover a table."""
    groups = _by_columns(shards)
    covered = sorted(groups)
    ends = [0, *(end for _, end in covered)]
    if [begin for begin, _ in covered] != ends[:-1] or ends[-1] != table.dim:
        raise ValueError(f"table {at}: columns {covered} do not cover its {table.dim}")
    for group in groups.values():
        for what in ("key_share", "row_share"):
            total = sum(getattr(shard, what) for shard in group)
            if abs(total - 1) > 1e-6:
                raise ValueError(f"table {at}: {what} adds up to {total}, not to 1")
    named = {device for shard in shards for device in shard.devices}
    if not all(shard.devices for shard in shards) or not named <= set(range(devices)):
        raise ValueError(f"table {at}: devices {sorted(named)}; there are {devices}")
