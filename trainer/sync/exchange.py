"""The exchange of one store's rows and gradients with the ranks that own them (ZionEX, section 4).

A step of a rank, for its part of a batch:

    ask      each key once, to the rank that owns its bucket; how many of each table came first
    rows     owners look them up and send them, the same order
    pool     into the bags of the batch (Routed): sums as a store of its own makes them
    give     the summed gradient of each key goes the same way
    apply    owners take a step with the gradients of all ranks, in the order of ranks

Rows of tables that are everywhere are looked up here; their gradients go to all ranks. Rows of
column-wise tables are asked for at each rank that has a part of them, and joined here. Keys travel
through a channel of their own, so that the next batch's may be asked for while this one is learned.

Shapes: R ranks, T tables, U keys, D values.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embertide import _store
from embertide.trainer.config import Codec, Codecs
from embertide.trainer.sync import codec
from embertide.trainer.sync.channel import Pending
from embertide.trainer.sync.codec import Block, Feedback
from embertide.trainer.sync.plan import Columns, Ownership
from embertide.trainer.sync.ranks import Ranks

Keys = NDArray[np.int64]
Floats = NDArray[np.float32]
BagKeys = tuple[int, Keys, NDArray[np.uint32] | None]
Lookup: TypeAlias = "Callable[[Sequence[_store.BagLookup]], list[_store.RowPlaces]]"

Number = TypeVar("Number", np.int64, np.uint32, np.float32)

_FEEDBACK_PLACES = 1 << 14
"""Keys of a table whose remainders a rank keeps."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """Keys that were asked for, and those that others asked of this rank.

    Attributes:
        routed: This rank's batch.
        keys_RT: Keys that each rank asks for, or has gradients of, by table.
        counts_RT: How often each occurred there; None where nobody wants to know.
        places: By rank and table, where `rows` found the rows of keys_RT here, if it was told.
    """

    routed: _store.Routed
    keys_RT: list[list[Keys]]
    counts_RT: list[list[NDArray[np.uint32]]] | None
    places: "dict[tuple[int, int], _store.RowPlaces]" = dataclasses.field(default_factory=dict)


class Part(NamedTuple):
    """The floats that one rank has of the rows of a column-wise table.

    Attributes:
        columns: The rank, and the chunks.
        first: The first of their floats.
        dim: How many.
    """

    columns: Columns
    first: int
    dim: int


class Exchange:
    """Exchanges rows with other ranks' stores. All ranks make the same calls in one order.

    `ask` may be called by one thread, all else by another.

    Args:
        ranks: Who there is.
        tables: The store's.
        ownership: Who owns what.
        codecs: How it travels.
        counting: Whether owners must know how often a key occurs.
        hot: Whether some rows may be hot: each table then stands there once more, behind all of
            them, with those of its keys that have a rank of their own (`Router.set_hosts`).

    Attributes:
        everywhere: Tables whose rows all ranks have.
        columns: Of column-wise tables, who has which floats of their rows.
        answered_dims: Floats that are learned of a row of each table, as this rank answers for it.
    """

    def __init__(
        self,
        ranks: Ranks,
        tables: Sequence[_store.TableConfig],
        ownership: Ownership,
        codecs: Codecs,
        *,
        counting: bool,
        hot: bool = False,
    ) -> None:
        """Open the channels."""
        self.ranks = ranks
        self.ownership = ownership
        self.codecs = codecs
        self._counting = counting
        self._keys = ranks.channel("keys")
        self._rows = ranks.channel("rows")
        self._widths = [table.layout.dim for table in tables]
        self._dims = [
            table.layout.dim - table.counter_chunks * table.layout.chunk_dim for table in tables
        ]
        routed = [
            (table.bucket_bits, width, dim, owners)
            for table, width, dim, owners in zip(
                tables, self._widths, self._dims, ownership.owners_T, strict=True
            )
        ]
        self._tables = len(tables)
        if hot:
            # No key is routed to these by its bucket.
            nobody = np.zeros(1, np.uint16)
            routed += [(0, width, dim, nobody) for _, width, dim, _ in routed]
            self._widths, self._dims = 2 * self._widths, 2 * self._dims
        self.router = _store.Router(routed, ranks=ranks.size, rank=ranks.rank)
        self.everywhere = [t for t in range(len(tables)) if ownership.everywhere(t)]
        self.columns: dict[int, list[Part]] = {}
        for t, table in enumerate(tables):
            size = table.layout.chunk_dim
            parts = [Part(at, at.first * size, at.chunks * size) for at in ownership.columns(t)]
            if parts:
                self.columns[t] = parts
        self._answered_widths, self.answered_dims = [*self._widths], [*self._dims]
        for t, parts in self.columns.items():
            here = next((part.dim for part in parts if part.columns.rank == ranks.rank), 0)
            self._answered_widths[t] = self.answered_dims[t] = here
        self.feedback: Feedback | None = None
        if codecs.gradients == "int8":
            self.feedback = Feedback(_FEEDBACK_PLACES, self._dims[: self._tables])

    # --- keys -------------------------------------------------------------------------------------

    def ask(self, bags: Sequence[BagKeys]) -> Asked:
        """Ask the owners for the keys of a batch.

        Raises:
            RankLostError: A rank is gone.
        """
        size, tables = self.ranks.size, len(self._dims)
        routed = self.router.route(bags)
        lengths_RT = routed.lengths.reshape(size, tables).astype(np.int64)
        keys_N, counts_N = routed.keys, routed.counts
        if self.everywhere or self.columns:
            keys_N = self._to_more(routed.keys, lengths_RT)
            counts_N = self._to_more(routed.counts, lengths_RT)
            lengths_RT = self._lengths_to_more(lengths_RT)
        sent = torch.from_numpy(np.ascontiguousarray(lengths_RT.astype(np.int32)).reshape(-1))
        got = self._keys.exchange(sent, [tables] * size, [tables] * size, "lengths").wait()
        from_RT = got.numpy().reshape(size, tables)
        to_R, from_R = lengths_RT.sum(axis=1).tolist(), from_RT.sum(axis=1).tolist()
        keys = self._keys.exchange(torch.from_numpy(keys_N), to_R, from_R, "keys").wait()
        counts_RT = None
        if self._counting:
            sent = torch.from_numpy(counts_N.view(np.int32))
            came = self._keys.exchange(sent, to_R, from_R, "counts").wait()
            counts_RT = _by_table(came.numpy().view(np.uint32), from_RT)
        return Asked(routed, _by_table(keys.numpy(), from_RT), counts_RT)

    def _to_more(self, values: NDArray[Number], lengths_RT: NDArray[np.int64]) -> NDArray[Number]:
        """Return keys, or what there is of each, with those that go to more ranks than an owner.

        Those of a table that is everywhere go along for their gradients' sake; all of a column-wise
        table, whoever owns their buckets, go to each rank that has a part of its rows.
        """
        values_RT = _by_table(values, lengths_RT)
        for values_T in values_RT:
            for t in self.everywhere:
                values_T[t] = values_RT[self.ranks.rank][t]
        for t, parts in self.columns.items():
            every = np.concatenate([values_T[t] for values_T in values_RT])
            for values_T in values_RT:
                values_T[t] = every[:0]
            for part in parts:
                values_RT[part.columns.rank][t] = every
        return np.concatenate([each for values_T in values_RT for each in values_T])

    def _lengths_to_more(self, lengths_RT: NDArray[np.int64]) -> NDArray[np.int64]:
        more_RT = lengths_RT.copy()
        for t in self.everywhere:
            more_RT[:, t] = lengths_RT[self.ranks.rank, t]
        for t, parts in self.columns.items():
            more_RT[:, t] = 0
            more_RT[[part.columns.rank for part in parts], t] = lengths_RT[:, t].sum()
        return more_RT

    # --- what all ranks must know -----------------------------------------------------------------

    def mine(self, table: int, keys_U: Keys) -> NDArray[np.bool_]:
        """Return which keys' rows this rank holds."""
        mine_U: NDArray[np.bool_] = self.router.owners(table, keys_U) == self.ranks.rank
        return mine_U

    def summed(self, values: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
        """Return the sum of an array over all ranks, the same on each."""
        total: NDArray[np.float64] = self._rows.sum(torch.from_numpy(values), kind).wait().numpy()
        return total

    def samples(self, sample: bytes) -> list[bytes]:
        """Return the bytes that each rank gives, by rank."""
        return self._rows.gather_bytes(sample, "samples")

    # --- rows -------------------------------------------------------------------------------------

    def _row_block(self, table: int, keys: int, *, answers: bool = False) -> Block:
        width = self._answered_widths[table] if answers else self._widths[table]
        dim = self.answered_dims[table] if answers else self._dims[table]
        return Block(keys, width, exact=width - dim)

    def rows(self, asked: Asked, lookup: Lookup) -> Floats:
        """Return the rows of a batch's keys, in their order.

        Args:
            asked: The result of `ask`.
            lookup: Looks keys up in this rank's store; `asked` keeps the places that it tells.

        Raises:
            RankLostError: A rank is gone.
        """
        mine = self.ranks.rank
        blocks_R = [
            [
                self._row_block(
                    t, 0 if rank != mine and t in self.everywhere else len(keys), answers=True
                )
                for t, keys in enumerate(keys_T)
            ]
            for rank, keys_T in enumerate(asked.keys_RT)
        ]
        out = np.empty(sum(_floats(blocks) for blocks in blocks_R), np.float32)
        lookups: list[_store.BagLookup] = []
        looked_up: list[tuple[int, int]] = []
        at = 0
        for rank, (keys_T, blocks) in enumerate(zip(asked.keys_RT, blocks_R, strict=True)):
            for t, block in enumerate(blocks):
                if block.keys:
                    end = at + block.keys * block.width
                    rows_UD = out[at:end].reshape(block.keys, block.width)
                    lookups.append((t, keys_T[t], None, "sum", rows_UD))
                    looked_up.append((rank, t))
                    at = end
        # None, if no step is to follow.
        asked.places.update(zip(looked_up, lookup(lookups), strict=False))
        lengths_RT = asked.routed.lengths.reshape(self.ranks.size, -1)
        back_R = [
            [self._row_block(t, n) for t, n in enumerate(lengths_T.tolist())]
            for lengths_T in lengths_RT
        ]
        if self.columns:
            back_R = self._in_parts(back_R)
        floats = self._travel(out, blocks_R, back_R, self.codecs.rows, "rows").floats()
        return self._joined(floats, back_R, lengths_RT) if self.columns else floats

    def _in_parts(self, blocks_R: list[list[Block]]) -> list[list[Block]]:
        """Return routed blocks with those of column-wise tables at the ranks that have parts."""
        in_parts_R = [[*blocks] for blocks in blocks_R]
        for t, parts in self.columns.items():
            keys = sum(blocks[t].keys for blocks in blocks_R)
            for blocks in in_parts_R:
                blocks[t] = Block(0, self._widths[t])
            for part in parts:
                in_parts_R[part.columns.rank][t] = Block(keys, part.dim)
        return in_parts_R

    def _joined(
        self, floats: Floats, back_R: list[list[Block]], lengths_RT: NDArray[np.uint32]
    ) -> Floats:
        """Return rows as they were routed, with those of column-wise tables joined."""
        pieces_RT = _cut(floats, back_R)
        for t, parts in self.columns.items():
            keys_R = lengths_RT[:, t].astype(np.int64)
            whole_UD = np.empty((keys_R.sum(), self._widths[t]), np.float32)
            for part in parts:
                piece = pieces_RT[part.columns.rank][t]
                whole_UD[:, part.first : part.first + part.dim] = piece.reshape(-1, part.dim)
            for pieces_T, rows in zip(
                pieces_RT, np.split(whole_UD, np.cumsum(keys_R)[:-1]), strict=True
            ):
                pieces_T[t] = rows.reshape(-1)
        return np.concatenate([each for pieces_T in pieces_RT for each in pieces_T])

    # --- gradients --------------------------------------------------------------------------------

    def give(self, asked: Asked, sums: Floats) -> "Travelling | None":
        """Send the summed gradients of a batch's keys to their owners.

        Returns what comes of others; None: nothing does.

        Args:
            asked: The result of `ask`.
            sums: The result of `asked.routed.sum`; int8 changes it.
        """
        lengths_RT = asked.routed.lengths.reshape(self.ranks.size, -1).astype(np.int64)
        to_R = [
            [Block(n, dim) for n, dim in zip(lengths_T.tolist(), self._dims, strict=True)]
            for lengths_T in lengths_RT
        ]
        if self.feedback is not None:
            self._feed_back(asked, sums, to_R)
        if self.everywhere:
            sums, to_R = self._to_all(sums, to_R)
        if self.columns:
            sums, to_R = self._to_parts(sums, to_R)
        from_R = [
            [Block(len(keys), self.answered_dims[t]) for t, keys in enumerate(keys_T)]
            for keys_T in asked.keys_RT
        ]
        return self._travel(sums, to_R, from_R, self.codecs.gradients, "gradients")

    def gradients(
        self, asked: Asked, came: "Travelling"
    ) -> "tuple[list[_store.BagGradients], list[_store.RowPlaces | None]]":
        """Return the gradients of all ranks for this rank's rows, in the order of ranks.

        Beside them, where the rows of each bag's keys were found; None: that is not known.

        Raises:
            RankLostError: A rank is gone.
        """
        floats = came.floats()
        bags: list[_store.BagGradients] = []
        places: list[_store.RowPlaces | None] = []
        at = 0
        for rank, keys_T in enumerate(asked.keys_RT):
            for t, keys in enumerate(keys_T):
                n, dim = len(keys), self.answered_dims[t]
                if n:
                    gradients_UD = floats[at : at + n * dim].reshape(n, dim)
                    counts = None if asked.counts_RT is None else asked.counts_RT[rank][t]
                    bags.append((t, keys, None, gradients_UD, counts))
                    places.append(asked.places.get((rank, t)))
                    at += n * dim
        return bags, places

    def _to_all(self, sums: Floats, to_R: list[list[Block]]) -> tuple[Floats, list[list[Block]]]:
        """Add the gradients of tables that are everywhere to what each other rank gets."""
        mine = self.ranks.rank
        parts_RT = _cut(sums, to_R)
        how = self.codecs.gradients
        for t in self.everywhere:
            # Here, too, as others get it: all ranks' rows must stay the same.
            own = [to_R[mine][t]]
            rounded = codec.decode(how, codec.encode(how, parts_RT[mine][t], own), own)
            for rank, parts in enumerate(parts_RT):
                parts[t] = rounded
                to_R[rank][t] = to_R[mine][t]
        return np.concatenate([part for parts in parts_RT for part in parts]), to_R

    def _to_parts(self, sums: Floats, to_R: list[list[Block]]) -> tuple[Floats, list[list[Block]]]:
        """Divide the gradients of column-wise tables among the ranks that have parts of rows."""
        pieces_RT = _cut(sums, to_R)
        for t, parts in self.columns.items():
            whole = np.concatenate([pieces_T[t] for pieces_T in pieces_RT])
            whole_UD = whole.reshape(-1, self._dims[t])
            for pieces_T in pieces_RT:
                pieces_T[t] = whole[:0]
            for part in parts:
                columns = whole_UD[:, part.first : part.first + part.dim]
                pieces_RT[part.columns.rank][t] = columns.reshape(-1)
        sums = np.concatenate([each for pieces_T in pieces_RT for each in pieces_T])
        return sums, self._in_parts(to_R)

    def _feed_back(self, asked: Asked, sums: Floats, to_R: list[list[Block]]) -> None:
        """Bring in what the last gradients of the same keys lost, and keep what these will lose."""
        assert self.feedback is not None
        key_at = at = 0
        for rank, blocks in enumerate(to_R):
            for t, block in enumerate(blocks):
                n, dim = block.keys, block.width
                goes = rank != self.ranks.rank or t in self.everywhere
                if n and goes:
                    keys_U = asked.routed.keys[key_at : key_at + n]
                    gradients_UD = sums[at : at + n * dim].reshape(n, dim)
                    of = t % self._tables  # a hot key's are those of its table
                    self.feedback.add(of, keys_U, gradients_UD)
                    sent = codec.encode("int8", gradients_UD.reshape(-1), [block])
                    rest = gradients_UD - codec.decode("int8", sent, [block]).reshape(n, dim)
                    self.feedback.keep(of, keys_U, rest)
                key_at += n
                at += n * dim

    def _travel(
        self,
        values: Floats,
        to_R: list[list[Block]],
        from_R: list[list[Block]],
        how: Codec,
        kind: str,
    ) -> "Travelling":
        """Send blocks of values to all ranks. What a rank keeps for itself is not encoded."""
        mine = self.ranks.rank
        sizes = [_floats(blocks) for blocks in to_R]
        if how == "fp32":
            # As they lie: nothing is copied but by the network.
            came = [_floats(blocks) for blocks in from_R]
            sent = torch.from_numpy(values)
            return Travelling(self._rows.exchange(sent, sizes, came, kind), from_R, how)
        ends = np.cumsum(sizes)
        parts: list[Tensor] = []
        for rank, blocks in enumerate(to_R):
            part = values[ends[rank] - sizes[rank] : ends[rank]]
            parts.append(
                torch.empty(0, dtype=torch.uint8)
                if rank == mine
                else codec.encode(how, part, blocks)
            )
        bytes_to = [len(part) for part in parts]
        bytes_from = [
            0 if rank == mine else codec.wire_bytes(how, blocks)
            for rank, blocks in enumerate(from_R)
        ]
        pending = self._rows.exchange(torch.cat(parts), bytes_to, bytes_from, kind)
        own = values[ends[mine] - sizes[mine] : ends[mine]]
        return Travelling(pending, from_R, how, own, mine, bytes_from)


@dataclasses.dataclass(slots=True)
class Travelling:
    """Blocks of values on their way from all ranks to this one.

    Attributes:
        pending: The exchange.
        from_R: The blocks that come from each rank.
        codec: How.
        own: The values that this rank keeps, which are not encoded; None: they are among those that
            come.
        rank: This one.
        bytes_R: The bytes that come from each rank, encoded.
        taken: Whether they have been waited for.
    """

    pending: Pending
    from_R: list[list[Block]]
    codec: Codec
    own: Floats | None = None
    rank: int = 0
    bytes_R: Sequence[int] = ()
    taken: bool = False

    def floats(self) -> Floats:
        """Return them, rank after rank.

        Raises:
            RankLostError: A rank is gone.
        """
        data = self.pending.wait()
        self.taken = True
        if self.own is None:
            values: Floats = data.numpy()
            return values
        parts: list[Floats] = []
        at = 0
        for rank, (blocks, size) in enumerate(zip(self.from_R, self.bytes_R, strict=True)):
            if rank == self.rank:
                parts.append(self.own)
            elif size:
                parts.append(codec.decode(self.codec, data[at : at + size], blocks))
                at += size
        return np.concatenate(parts)


def _floats(blocks: Sequence[Block]) -> int:
    return sum(block.keys * block.width for block in blocks)


def _cut(values: Floats, blocks_R: list[list[Block]]) -> list[list[Floats]]:
    """Cut values into (rank, table)."""
    floats_RT = np.array([[block.keys * block.width for block in blocks] for blocks in blocks_R])
    return _by_table(values, floats_RT)


def _by_table(
    values: NDArray[Number], lengths_RT: NDArray[np.int32] | NDArray[np.int64]
) -> list[list[NDArray[Number]]]:
    """Cut what came from all ranks into (rank, table)."""
    ends = np.cumsum(lengths_RT.reshape(-1))[:-1]
    pieces = np.split(values, ends)
    tables = lengths_RT.shape[1]
    return [pieces[at : at + tables] for at in range(0, len(pieces), tables)]
