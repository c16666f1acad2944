"""Which rank owns which bucket of a run's tables: a plan that is handed over, or a balanced one.

Four ways to hold a table (ZionEX, arXiv 2104.05158): whole at one rank; its buckets over ranks, by
rows; the chunks of each row over ranks, by columns (trainer/embedding/columns.py); or everywhere,
each rank with all rows, which then learn the same from all ranks' gradients. Ranks and their
buckets change from one start of a run to the next: checkpoints depend on neither.

The balanced plan costs a bucket what it was asked for in the run before (`Load`, kept beside
checkpoints); of a fresh run, a table's part of the columns of KEYS. The control plane's planners
may write a better one as a file (docs/formats.md, "Plan of a run").

Shapes: T tables, P buckets of a table, C chunks of its rows.
"""

import dataclasses
import heapq
import json
import logging
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embertide import _store
from embertide.trainer.config import ModelConfig
from embertide.trainer.errors import ConfigurationError

FORMAT = "embertide ranks 1"
"""Names the file's format, and its version."""
EVERYWHERE = _store.EVERYWHERE
# The cost of a bucket beside its keys: that of each step, however little is asked of it.
_MIN_SHARE = 1e-6

_UNEVEN = 1.1  # the dearest rank's over the mean, from where on it is said

Owners = NDArray[np.uint16]

log = logging.getLogger(__name__)


class Columns(NamedTuple):
    """The chunks of a column-wise table's rows that one rank has.

    Attributes:
        rank: The rank.
        first: The first of them.
        chunks: How many.
    """

    rank: int
    first: int
    chunks: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ownership:
    """Owners of all buckets, and ranks of the chunks of column-wise tables.

    Attributes:
        ranks: The number of ranks.
        owners_T: By table, the owner of each bucket; `EVERYWHERE` in all of a table's or none. Of a
            column-wise table, the rank that writes the bucket, and decides which keys have a row.
        ranks_TC: By table, the rank of each chunk of a column-wise one; none of others. May be
            shorter than there are tables.
        hot_rows: Rows, at most, that another rank answers for (trainer.sync.hot); None: as the
            run's configuration says.
    """

    ranks: int
    owners_T: tuple[Owners, ...]
    ranks_TC: tuple[tuple[int, ...], ...] = ()
    hot_rows: int | None = None

    def columns(self, table: int) -> list[Columns]:
        """Return who has which chunks of a column-wise table, in their order; none of another."""
        ranks_C = self.ranks_TC[table] if table < len(self.ranks_TC) else ()
        firsts = [c for c, rank in enumerate(ranks_C) if c == 0 or rank != ranks_C[c - 1]]
        ends = [*firsts[1:], len(ranks_C)]
        return [
            Columns(ranks_C[c], c, end - c) for c, end in zip(firsts, ends, strict=bool(firsts))
        ]

    def with_more(self, buckets_T: Sequence[int]) -> "Ownership":
        """Return it with more tables of so many buckets, which the ranks own in turn."""
        more = ((np.arange(buckets) % self.ranks).astype(np.uint16) for buckets in buckets_T)
        return dataclasses.replace(self, owners_T=(*self.owners_T, *more))

    def everywhere(self, table: int) -> bool:
        """Whether all ranks have all rows of a table."""
        return bool(self.owners_T[table][0] == EVERYWHERE)

    def holds(self, rank: int, table: int, bucket: int) -> bool:
        """Whether a rank has a bucket's rows."""
        return int(self.owners_T[table][bucket]) in (rank, EVERYWHERE)

    def publishes(self, rank: int, table: int, bucket: int) -> bool:
        """Whether a rank writes a bucket to versions: its owner, or one of all that have it."""
        owner = int(self.owners_T[table][bucket])
        return rank == (owner if owner != EVERYWHERE else (table + bucket) % self.ranks)


def homes_in_turn(table: int, buckets: int, ranks: int) -> Owners:
    """Return the homes of a column-wise table, who hold its rows: not all small tables' at one."""
    return ((table + np.arange(buckets)) % ranks).astype(np.uint16)


def _costs(model: ModelConfig, load: Sequence[Sequence[float]] | None) -> list[NDArray[np.float64]]:
    """Return what each bucket costs a step: keys asked for, times what each takes to look up."""
    costs: list[NDArray[np.float64]] = []
    columns = [column.table for column in model.columns]
    measured = load is not None and all(sum(of) > 0 for of in load)
    for t, table in enumerate(model.tables):
        buckets = 1 << table.bucket_bits
        keys_P = np.full(buckets, columns.count(table.name) / buckets, np.float64)
        if load is not None and measured:
            keys_P = np.array(load[t], np.float64)
        # A key costs its index entry, and the lines of its row there and back.
        costs.append(keys_P * (64 + 3 * 4 * table.width))
    return costs


def spread(costs: Sequence[float], ranks: int) -> list[int]:
    """Return a rank for each item: the dearest first, each to the rank that has least."""
    least = [(0.0, 0, rank) for rank in range(ranks)]
    owner = [0] * len(costs)
    floor = _MIN_SHARE * sum(costs)
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        cost, items, rank = heapq.heappop(least)
        owner[item] = rank
        heapq.heappush(least, (cost + costs[item] + floor, items + 1, rank))
    return owner


def balanced(
    model: ModelConfig, ranks: int, load: Sequence[Sequence[float]] | None = None
) -> Ownership:
    """Return a plan by which ranks have equally much to do.

    Args:
        model: Its tables.
        ranks: The number of ranks.
        load: By table, the keys that were asked of each bucket; None: nothing was measured.
    """
    costs = _costs(model, load)
    flat = np.concatenate(costs)
    owner = spread(flat.tolist(), ranks)
    of_rank = np.bincount(owner, flat, ranks)
    if of_rank.max() > _UNEVEN * of_rank.mean():
        dearest = int(np.argmax([each.max() for each in costs]))
        log.warning(
            "the dearest rank has %.2f times the mean to do: table %r has a bucket of %.0f %% of a "
            "rank's share; a new run may give it more bucket_bits",
            of_rank.max() / of_rank.mean(),
            model.tables[dearest].name,
            100 * costs[dearest].max() * ranks / flat.sum(),
        )
    ends = np.cumsum([len(each) for each in costs])[:-1]
    return Ownership(ranks, tuple(np.split(np.array(owner, np.uint16), ends)))


def read(path: Path, model: ModelConfig, ranks: int) -> Ownership:
    """Read a plan's file.

    Raises:
        ConfigurationError: It is not there, or not a plan for these tables and ranks; the message
            names the table and what to write.
    """
    # The ranks own histories that versions carry in turn, whatever a fleet says of them.
    histories = {sequence.table for sequence in model.sequences if sequence.published}
    return read_for(path, _buckets(model), ranks, ignored=histories, chunks=_chunks(model))


def read_for(
    path: Path,
    buckets: Mapping[str, int],
    ranks: int,
    ignored: Container[str] = (),
    chunks: Mapping[str, int] | None = None,
) -> Ownership:
    """Read a plan's file, for tables of so many buckets by name; `ignored` ones may stand in it.

    Args:
        path: The file.
        buckets: Of each table, by name.
        ranks: How many it must be for.
        ignored: Names that may stand there, whatever is said of them.
        chunks: Of the rows of each table, by name; None: no table may be column-wise.

    Raises:
        ConfigurationError: As `read`.
    """
    try:
        said: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: the plan cannot be read: {error}") from error
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise ConfigurationError(f"{path} is no plan of ranks: its format is not {FORMAT!r}")
    if said.get("ranks") != ranks:
        raise ConfigurationError(
            f"{path} is for {said.get('ranks')} ranks, and {ranks} were started: make a plan for "
            f"{ranks}, or leave --plan out for a balanced one"
        )
    given = said.get("tables")
    if isinstance(given, dict):
        given = {name: owners for name, owners in given.items() if name not in ignored}
    if not isinstance(given, dict) or set(given) != set(buckets):
        found = sorted(given) if isinstance(given, dict) else given
        raise ConfigurationError(f"{path} names the tables {found}; the model has {[*buckets]}")
    hot_rows = said.get("hot_rows")
    if hot_rows is not None and (type(hot_rows) is not int or hot_rows < 0):
        raise ConfigurationError(
            f"{path}: hot_rows is {hot_rows!r}; give 0, which is none, or more, or leave it out for"
            " what the run's configuration says"
        )
    found_plan = _plan(path, given, buckets, ranks, chunks)
    return dataclasses.replace(found_plan, hot_rows=hot_rows)


def _buckets(model: ModelConfig) -> dict[str, int]:
    return {table.name: 1 << table.bucket_bits for table in model.tables}


def _chunks(model: ModelConfig) -> dict[str, int]:
    return {table.name: table.chunks for table in model.tables}


def parsed(text: str, model: ModelConfig, ranks: int) -> Ownership | None:
    """Return a plan of `text`, if it is for so many ranks."""
    if not text:
        return None
    said = json.loads(text)
    if said["ranks"] != ranks:
        return None
    found = _plan(
        Path("the checkpoint's plan"), said["tables"], _buckets(model), ranks, _chunks(model)
    )
    return dataclasses.replace(found, hot_rows=said.get("hot_rows"))


def _plan(
    path: Path,
    given: Any,
    tables: Mapping[str, int],
    ranks: int,
    chunks: Mapping[str, int] | None,
) -> Ownership:
    owners: list[Owners] = []
    ranks_TC: list[tuple[int, ...]] = []
    for t, (name, buckets) in enumerate(tables.items()):
        said = given[name]
        if isinstance(said, dict):
            if chunks is None:
                raise ConfigurationError(
                    f"{path}: table {name!r} is column-wise, of which a profile says nothing: give"
                    " its buckets to ranks here"
                )
            ranks_TC.append(_columns(path, name, said, chunks[name], ranks))
            owners.append(homes_in_turn(t, buckets, ranks))
        else:
            ranks_TC.append(())
            owners.append(_owners(path, name, said, buckets, ranks))
    return Ownership(ranks, tuple(owners), tuple(ranks_TC) if any(ranks_TC) else ())


def _is_rank(said: Any, ranks: int) -> bool:
    return isinstance(said, int) and not isinstance(said, bool) and 0 <= said < ranks


def _columns(path: Path, table: str, said: Any, chunks: int, ranks: int) -> tuple[int, ...]:
    given = said.get("columns")
    if (
        set(said) != {"columns"}
        or not isinstance(given, list)
        or len(given) != chunks
        or not all(_is_rank(rank, ranks) for rank in given)
    ):
        raise ConfigurationError(
            f"{path}: table {table!r} has {json.dumps(said)}; its rows have {chunks} chunks: give"
            f' {{"columns": [...]}} with {chunks} ranks below {ranks}, one a chunk'
        )
    runs = [rank for c, rank in enumerate(given) if c == 0 or rank != given[c - 1]]
    if len(runs) == 1:
        raise ConfigurationError(
            f"{path}: table {table!r} has all of its {chunks} chunks at rank {runs[0]}: write"
            f" {runs[0]} for a table that one rank owns, or name other ranks, too"
        )
    if len(set(runs)) < len(runs):
        raise ConfigurationError(
            f"{path}: table {table!r} has columns {given}, in which a rank comes again after"
            " others; give each rank chunks that stand together"
        )
    return tuple(given)


def _owners(path: Path, table: str, said: Any, buckets: int, ranks: int) -> Owners:
    if said == "everywhere":
        return np.full(buckets, EVERYWHERE, np.uint16)
    given = [said] * buckets if isinstance(said, int) else said
    if (
        not isinstance(given, list)
        or len(given) != buckets
        or not all(_is_rank(rank, ranks) for rank in given)
    ):
        raise ConfigurationError(
            f'{path}: table {table!r} has {said!r}; give a rank below {ranks}, "everywhere", a '
            f'list of {buckets} ranks, one a bucket, or {{"columns": [...]}}'
        )
    return np.array(given, np.uint16)


def text(model: ModelConfig, ownership: Ownership) -> str:
    """Return a plan as a checkpoint has it, which has all rows at home; nothing of one rank."""
    if ownership.ranks == 1:
        return ""
    at_home = dataclasses.replace(ownership, hot_rows=None)
    return text_for([table.name for table in model.tables], at_home)


def text_for(names: Sequence[str], ownership: Ownership) -> str:
    """Return a plan of tables as its file has it."""
    tables: dict[str, Any] = {}
    for t, name in enumerate(names):
        if ownership.columns(t):
            tables[name] = {"columns": [*ownership.ranks_TC[t]]}
            continue
        owners = ownership.owners_T[t].tolist()
        whole = len(set(owners)) == 1
        tables[name] = "everywhere" if ownership.everywhere(t) else owners[0] if whole else owners
    said: dict[str, Any] = {"format": FORMAT, "ranks": ownership.ranks, "tables": tables}
    if ownership.hot_rows is not None:
        said["hot_rows"] = ownership.hot_rows
    return json.dumps(said, indent=1)
