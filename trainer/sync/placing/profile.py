"""Costs of a run's steps on its machine: measured once, written as a file, read by the search.

A profile holds for the tables, ranks and machine that it was measured with. `check` refuses it for
other tables, `check_machine` for another machine. `Profile.beyond` names each way in which a
strategy leaves what was measured, and a prediction carries these sentences along. docs/formats.md,
"Profile of a step", has the file.

Pure but for `read` and `write`. Shapes: T tables, P buckets of a table, R ranks.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from embertide._common.quoting import terminal_text
from embertide.trainer.config import ModelConfig
from embertide.trainer.errors import ConfigurationError

FORMAT = "embertide step profile 1"
"""Names the file's format, and its version."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TableProfile:
    """The load of a step on a table.

    Attributes:
        name: The table's.
        row_floats: Floats of a row on the wire.
        gradient_floats: Floats of a row's gradient.
        row_bytes: Bytes of a row in a rank's memory.
        rows: The number of rows.
        keys: Keys of an event, its columns in this table.
        distinct: (events of a part, distinct keys of such a part in the mean), ascending, with two
            points or more.
        load_P: Share of the distinct keys that each bucket is asked for.
        late: Share of the rows that a drive has when they are asked for.
        chunks: The chunks of a row that ranks may divide among them; 1: they may not.
    """

    name: str
    row_floats: int
    gradient_floats: int
    row_bytes: int
    rows: int
    keys: float
    distinct: tuple[tuple[float, float], ...]
    load_P: tuple[float, ...]
    late: float = 0.0
    chunks: int = 1

    def __post_init__(self) -> None:
        """Refuse what is no measurement."""
        points = [point for pair in self.distinct for point in pair]
        events = [pair[0] for pair in self.distinct]
        if len(self.distinct) < 2 or min(points) <= 0 or sorted(set(events)) != events:
            raise ValueError(
                f"table {self.name!r}: distinct is {self.distinct}; give (events, keys) for two"
                " sizes of parts or more, ascending, above 0"
            )
        if self.chunks < 1:
            raise ValueError(f"table {self.name!r}: chunks is {self.chunks}; give 1 or more")
        size = len(self.load_P)
        if not size or size & (size - 1) or min(self.load_P) < 0 or sum(self.load_P) <= 0:
            raise ValueError(
                f"table {self.name!r}: load_P has {size} shares that add up to"
                f" {sum(self.load_P):g}; give a power of two of shares, some above 0"
            )

    def distinct_keys(self, events: float) -> float:
        """Return the distinct keys of a part: between two measured sizes by a power law."""
        points = self.distinct
        at = next((n for n in range(1, len(points) - 1) if events <= points[n][0]), len(points) - 1)
        (few, less), (many, more) = points[at - 1], points[at]
        slope = math.log(more / less) / math.log(many / few)
        return float(less * (events / few) ** slope)


class HotKey(NamedTuple):
    """A key that is asked for often enough to be hot.

    Attributes:
        table: Number of its table.
        bucket: Its bucket.
        share: Its part of the table's keys that are asked for, each once by a rank and step.
    """

    table: int
    bucket: int
    share: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerProfile:
    """A layer of the dense net.

    Attributes:
        name: The layer's.
        parameters: The number of its parameters.
        forward_s: Seconds per event in the forward pass.
        backward_s: The same.
    """

    name: str
    parameters: int
    forward_s: float
    backward_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankProfile:
    """A rank, and its link to the others.

    Attributes:
        pace: Times that work takes here what `WorkProfile` and layers say.
        paces: The same of a kind of work that has a pace of its own, by name: "net", or a cost of
            `WorkProfile` without its unit, as "lookup".
        bytes_per_s: Bandwidth of its link in one direction, while the other is idle.
        together_bytes_per_s: Bandwidth of both directions at once, added up; 0: each has all of
            `bytes_per_s`.
        latency_s: Latency of a message.
        sum_bytes_per_s: Bandwidth of its link in an all-reduce, including the time to add up.
    """

    pace: float = 1.0
    paces: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bytes_per_s: float
    together_bytes_per_s: float = 0.0
    latency_s: float
    sum_bytes_per_s: float

    def exchange_s(self, sent: float, got: float) -> float:
        """Return what it takes to send some bytes while others come."""
        together = (sent + got) / self.together_bytes_per_s if self.together_bytes_per_s else 0.0
        return max(sent / self.bytes_per_s, together)

    def pace_of(self, kind: str) -> float:
        """Return times that a kind of work takes here what the profile says."""
        return self.paces.get(kind, self.pace)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkProfile:
    """Seconds of work on a rank of pace 1.

    Attributes:
        step_s: Cost of a step, however large it is, beside what follows.
        route_s: Cost of a key of an event: to find the distinct keys and their owners.
        lookup_s: Cost of a row that a rank is asked for.
        pool_s: Cost of a key of an event: to place its row in the net's input.
        give_s: Cost of a key of an event: to add its gradient to that of its row.
        update_s: Cost of a gradient that one rank has for one row.
        adam_s: Cost of a parameter of the net.
        select_s: Cost of a parameter: to choose the largest gradients, and to add up those of a
            rank.
        codec_s: By codec, of a number: to encode or to decode it. "fp32" takes none.
        late_s: Cost of a row that a drive has.
        publish_s: Cost of writing a version, on each rank, in the mean of steps.
        count_s: Cost of a key that a rank is asked for, where hot rows are counted, in the mean of
            steps.
    """

    step_s: float = 0.0
    route_s: float
    lookup_s: float
    pool_s: float
    give_s: float
    update_s: float
    adam_s: float
    select_s: float = 0.0
    codec_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    late_s: float = 0.0
    publish_s: float = 0.0
    count_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The costs of a run's steps.

    Attributes:
        machine: Where it was measured, in words.
        cores: Cores of each rank: with one, all its threads take turns.
        events: Events of a batch, all ranks together.
        tables: In the model's order.
        layers: Layers of the net, in the order of the forward pass.
        rows_enter: The layer that gets the embeddings; backward passes of those before it run
            while gradients of rows travel.
        ranks: The profile of each rank of the run that was measured.
        work: The costs of work.
        budget_bytes: Memory of a rank for rows.
        step_s: A step of that run, in the mean; 0: not measured.
        measured: Spans of one of its steps, as [lane, name, begin_s, end_s]; may be empty.
        hot: Keys that were asked for most often, of all tables; empty: they were not counted.
        version_steps: Steps from one version to the next, for rows that go out and home; 0: not
            known.
    """

    machine: str
    cores: int
    events: int
    tables: tuple[TableProfile, ...]
    layers: tuple[LayerProfile, ...]
    rows_enter: int = 0
    ranks: tuple[RankProfile, ...]
    work: WorkProfile
    budget_bytes: int
    step_s: float = 0.0
    measured: tuple[tuple[str, str, float, float], ...] = ()
    hot: tuple[HotKey, ...] = ()
    version_steps: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a profile of nothing."""
        for name, least in (("cores", 1), ("events", 1), ("budget_bytes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("tables", "layers", "ranks"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty")
        for key in self.hot:
            buckets = [len(table.load_P) for table in self.tables[key.table : key.table + 1]]
            if key.table < 0 or not buckets or not 0 <= key.bucket < buckets[0] or key.share < 0:
                raise ValueError(f"{key} is in no bucket of a table")
        if not 0 <= self.rows_enter < len(self.layers):
            raise ValueError(
                f"rows_enter is {self.rows_enter}; give a layer from 0 to {len(self.layers) - 1}"
            )

    def rank(self, number: int) -> RankProfile:
        """Return a rank's profile; of one that was not there, that of the slowest that was."""
        if number < len(self.ranks):
            return self.ranks[number]
        kinds = {kind for each in self.ranks for kind in each.paces}
        return RankProfile(
            pace=max(each.pace for each in self.ranks),
            paces={kind: max(each.pace_of(kind) for each in self.ranks) for kind in sorted(kinds)},
            bytes_per_s=min(each.bytes_per_s for each in self.ranks),
            together_bytes_per_s=min(
                each.together_bytes_per_s or 2 * each.bytes_per_s for each in self.ranks
            ),
            latency_s=max(each.latency_s for each in self.ranks),
            sum_bytes_per_s=min(each.sum_bytes_per_s for each in self.ranks),
        )

    def beyond(
        self,
        ranks: int,
        codecs: Sequence[str] = (),
        *,
        selects: bool = False,
        hot_rows: int = 0,
    ) -> list[str]:
        """Return what of a strategy was not measured, a sentence each; empty: nothing."""
        said: list[str] = []
        if ranks != len(self.ranks):
            said.append(
                f"{ranks} ranks: measured were {len(self.ranks)}; links and cores of others are"
                " assumed to be as the slowest of them"
            )
        part = self.events / ranks
        least = max(table.distinct[0][0] for table in self.tables)
        most = min(table.distinct[-1][0] for table in self.tables)
        if not least <= part <= most:
            said.append(
                f"parts of {part:g} events: distinct keys were counted from {least:g} to {most:g}"
            )
        said += [
            f"codec {name}: encoding was not measured, and is taken to cost nothing"
            for name in sorted({*codecs} - {"fp32", *self.work.codec_s})
        ]
        if selects and not self.work.select_s:
            said.append("DCT: its choice of gradients was not measured, and is taken to be free")
        if hot_rows > len(self.hot):
            said.append(
                f"hot_rows of {hot_rows}: {len(self.hot)} keys were counted, and the others are"
                " taken to stay at home"
            )
        if hot_rows and not self.version_steps:
            said.append("the way of hot rows out and home: it is taken to cost nothing")
        return said


def check(profile: Profile, model: ModelConfig) -> None:
    """Refuse a profile of other tables than a model's.

    Raises:
        ConfigurationError: The message names the table.
    """
    found = {table.name: len(table.load_P) for table in profile.tables}
    wanted = {table.name: 1 << table.bucket_bits for table in model.tables}
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            raise ConfigurationError(
                f"the profile is of another model: table {name!r} has {found.get(name, 'no')}"
                f" buckets there and {wanted.get(name, 'no')} here; measure this model's steps"
            )


def check_machine(profile: Profile, machine: str) -> None:
    """Refuse a profile of another machine than one in words.

    Raises:
        ConfigurationError: The message names both.
    """
    if machine != profile.machine:
        raise ConfigurationError(
            f"the profile was measured on another machine ({terminal_text(profile.machine)}), and"
            f" this is {machine}: measure here, or say --elsewhere where the run is there"
        )


def write(profile: Profile, path: Path) -> None:
    """Write a profile's file.

    Raises:
        ConfigurationError: It cannot be written.
    """
    said = {"format": FORMAT, **dataclasses.asdict(profile)}
    try:
        path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path}: the profile cannot be written: {error}") from error


def read(path: Path) -> Profile:
    """Read a profile's file.

    Raises:
        ConfigurationError: It is not there, or no profile; the message says what is wrong.
    """
    try:
        said: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: the profile cannot be read: {error}") from error
    if not isinstance(said, dict) or said.pop("format", None) != FORMAT:
        raise ConfigurationError(f"{path} is no profile of a step: its format is not {FORMAT!r}")
    try:
        profile: Profile = _made(Profile, said)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{path}: the profile is damaged: {error}") from error
    return profile


def _made(kind: Any, value: Any) -> Any:
    """Return a value of a type as JSON has it.

    Raises:
        TypeError: It is of another type.
    """
    origin = typing.get_origin(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise TypeError(f"{value!r} is no {kind.__name__}")
        hints = typing.get_type_hints(kind)
        unknown = sorted({*value} - {*hints})
        if unknown:
            raise TypeError(f"{kind.__name__} has no {unknown[0]!r}")
        return kind(**{name: _made(hints[name], each) for name, each in value.items()})
    if isinstance(kind, type) and issubclass(kind, tuple) and origin is None:
        fields = typing.get_type_hints(kind)
        if not isinstance(value, list) or len(value) != len(fields):
            raise TypeError(f"{value!r} is no {kind.__name__}")
        return kind(*(_made(of, each) for of, each in zip(fields.values(), value, strict=True)))
    if origin is tuple:
        kinds = typing.get_args(kind)
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is no list")
        if kinds[-1] is types.EllipsisType or kinds[-1] is ...:
            return tuple(_made(kinds[0], each) for each in value)
        return tuple(_made(of, each) for of, each in zip(kinds, value, strict=True))
    if isinstance(value, dict) and origin is not None:
        of = typing.get_args(kind)[1]
        return {str(name): _made(of, each) for name, each in value.items()}
    if kind is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is no measurement")
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {getattr(kind, '__name__', kind)}")
    return value
