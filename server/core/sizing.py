"""The size of a fleet from what it is to hold and to answer: docs/sizing.md's formulas, computed.

`QUESTIONS` are asked on the command line and on the console's page; `size` answers.
Bytes of rows are measured (docs/results/store.md), and so is a key's time. The share of reads that
DDR answers is simulated by the store's own policy over keys of Zipf's law, on a smaller table.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from embertide._store import CacheTrace

GIB = 1 << 30
_INDEX, _SLOT, _BLOCK, _TRAINING, _RECORD = 24, 24, 20, 49, 12  # bytes a row, beside its values
_WINDOW = 8  # versions that a node holds
_FREE = 1 / 8  # of DDR, that a node keeps for moves
_SSD_ROOM = 4 / 3  # an SSD's budget over its rows: segments that are compacted
_KEY_S = 217e-9  # CPU time of a key that is looked up, its request included
_BUSY = 0.5  # of its cores and of its drive, that a node may use
_KEPT_S = 30.0  # of versions, that the bus keeps for a node that is slow
_DAY_S = 86_400
_KEYS, _READS = 100_000, 400_000  # of the simulated table
_SEED = 7


class Question(NamedTuple):
    """A number that is asked for.

    Attributes:
        label: The question.
        default: The number where none is given.
        least: Of what is taken.
        most: Likewise.
        whole: Whether it is to be a whole number.
    """

    label: str
    default: float
    least: float
    most: float
    whole: bool = True


QUESTIONS: Mapping[str, Question] = {
    "rows": Question("rows of all tables", 100_000_000, 1, 1e13),
    "row_bytes": Question(
        "bytes of a row's values as nodes have them (dim x 4 for fp32, x 2 for fp16; dim + 4 for"
        " int8, dim / 2 + 4 for int4)",
        128,
        1,
        65536,
    ),
    "trained_row_bytes": Question(
        "bytes of a row's values where they are trained (dim x 4 for fp32); 0: the same",
        0,
        0,
        65536,
    ),
    "changed_per_s": Question("rows that change a second", 1000, 0, 1e9),
    "publish_s": Question("seconds from one version to the next", 60, 1, 86_400),
    "requests_per_s": Question("requests a second", 1000, 0, 1e9),
    "keys_a_request": Question("keys of a request", 1000, 1, 1 << 22),
    "ddr_percent": Question(
        "per cent of the rows that DDR shall hold; the rest lies on SSD", 100, 1, 100
    ),
    "skew": Question(
        "skew of what is read (exponent of Zipf's law; 0: all rows alike)", 1.0, 0, 3, whole=False
    ),
    "copies": Question("copies of the whole model (groups of nodes)", 2, 1, 64),
    "node_ddr_gib": Question("GiB of memory that a node may use", 64, 1, 65_536),
    "node_cores": Question("cores of a node", 16, 1, 4096),
    "drive_reads_per_s": Question(
        "reads of 4 KiB a second that a node's drive gives", 200_000, 1, 1e9
    ),
}


class SizingError(ValueError):
    """An answer that cannot be.

    Attributes:
        question: Name of its question.
    """

    def __init__(self, question: str, message: str) -> None:
        """Say what is wrong with it."""
        super().__init__(message)
        self.question = question


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A fleet that fits.

    Attributes:
        nodes: Nodes in all.
        nodes_a_copy: Those of one copy of the model.
        bound: What decides how many: memory, cores, or reads of drives.
        ddr_bytes: DDR budget of a node.
        ssd_bytes: SSD budget of a node; 0: none is needed.
        ddr_share: Of its own rows' reads, what DDR answers.
        ssd_reads_per_s: Of a node.
        keys_per_s: That a node looks up, for peers too.
        cores: Of a node, that are busy with it.
        remote_share: Of a request's keys, those of other nodes, without copies of hot rows.
        version_bytes: Of a version, as it is published.
        bus_bytes: Memory of the bus' Redis.
        day_bytes: Deltas of a day, in the publication.
        snapshot_bytes: Of a snapshot.
        trainer_bytes: DDR of the trainer, all rows in memory.
    """

    nodes: int
    nodes_a_copy: int
    bound: str
    ddr_bytes: float
    ssd_bytes: float
    ddr_share: float
    ssd_reads_per_s: float
    keys_per_s: float
    cores: float
    remote_share: float
    version_bytes: float
    bus_bytes: float
    day_bytes: float
    snapshot_bytes: float
    trainer_bytes: float


def answers_of(texts: Mapping[str, str]) -> dict[str, float]:
    """Read what somebody wrote; what is missing or empty has its default.

    Raises:
        SizingError: A text is no number, or one that is not taken.
    """
    return {name: _number(name, texts.get(name, "")) for name in QUESTIONS}


def _number(name: str, text: str) -> float:
    question = QUESTIONS[name]
    text = text.strip().replace(",", "").replace("_", "")
    if not text:
        return question.default
    try:
        value = float(text)
    except ValueError:
        raise SizingError(name, f"{question.label}: {text!r} is no number; give one") from None
    check(name, value)
    return value


def check(name: str, value: float) -> None:
    """Refuse what is out of bounds.

    Raises:
        SizingError: It is.
    """
    question = QUESTIONS[name]
    fits = question.least <= value <= question.most and not (question.whole and value % 1)
    if not fits:
        kind = "a whole number" if question.whole else "a number"
        raise SizingError(
            name,
            f"{question.label}: it is {value:,.15g}; give {kind} from {question.least:,.15g} to "
            f"{question.most:,.15g}",
        )


@functools.lru_cache(maxsize=256)
def share_in_ddr(ddr_percent: float, skew: float) -> float:
    """Return the share of reads that DDR answers, by the policy `clock` of the store.

    The simulated table is smaller than the real one: a share of the rows answers about as much of
    the reads in both.
    """
    if ddr_percent >= 100:
        return 1.0
    weights = np.arange(1, _KEYS + 1, dtype=np.float64) ** -skew
    drawn = np.random.default_rng(_SEED).random(2 * _READS)
    keys = np.searchsorted(np.cumsum(weights) / weights.sum(), drawn).astype(np.int64)
    capacity = max(1, round(_KEYS * ddr_percent / 100))
    whole, first = (
        CacheTrace(each).simulate("clock", capacity).hits for each in (keys, keys[:_READS])
    )
    return (whole - first) / _READS  # once it is warm


def size(given: Mapping[str, float]) -> Size:
    """Return the fleet for answers of `QUESTIONS`, each checked."""
    rows, payload = given["rows"], given["row_bytes"]
    changed = min(given["changed_per_s"] * given["publish_s"], rows)
    in_ddr = rows * given["ddr_percent"] / 100
    ddr = in_ddr * (payload + _SLOT) + (rows - in_ddr) * _INDEX
    ddr = (ddr + _WINDOW * changed * (payload + _SLOT)) / (1 - _FREE)
    ssd = (rows - in_ddr) * (payload + _BLOCK) * _SSD_ROOM
    keys_per_s = given["requests_per_s"] * given["keys_a_request"] / given["copies"]
    by_memory = math.ceil(ddr / (given["node_ddr_gib"] * GIB))
    by_cores = math.ceil(keys_per_s * _KEY_S / (given["node_cores"] * _BUSY))
    ddr_share = share_in_ddr(given["ddr_percent"], given["skew"])
    by_drives = math.ceil((1 - ddr_share) * keys_per_s / (given["drive_reads_per_s"] * _BUSY))
    needed = {"memory": by_memory, "cores": by_cores, "reads of drives": by_drives}
    bound = max(needed, key=lambda name: needed[name])
    nodes = max(1, needed[bound])
    trained = given["trained_row_bytes"] or payload
    version = changed * (payload + _RECORD)
    return Size(
        nodes=nodes * int(given["copies"]),
        nodes_a_copy=nodes,
        bound=bound,
        ddr_bytes=ddr / nodes,
        ssd_bytes=ssd / nodes,
        ddr_share=ddr_share,
        ssd_reads_per_s=(1 - ddr_share) * keys_per_s / nodes,
        keys_per_s=keys_per_s / nodes,
        cores=keys_per_s * _KEY_S / nodes,
        remote_share=1 - 1 / nodes,
        version_bytes=version,
        bus_bytes=version * (1 + math.ceil(_KEPT_S / given["publish_s"])),
        day_bytes=version * _DAY_S / given["publish_s"],
        snapshot_bytes=rows * (payload + _RECORD),
        trainer_bytes=rows * (trained + _TRAINING),
    )
