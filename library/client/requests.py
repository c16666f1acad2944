"""From columns to requests, and from answers to results. Pure: nothing is sent here.

Shapes: B samples, F features, N keys, D columns of DENSE.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.client import contexts
from embertide.client.errors import ClientError, InputError
from embertide.client.schema import Feature, Schema
from embertide.client.tables import Keys, Table, floats_of, keys_of, open_table


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request: samples `begin` to `end` of a call.

    Attributes:
        arrays: Tensors by name.
        parameters: Those of the request.
        lengths_BF: Keys that are looked up, of all features, made ones included.
    """

    begin: int
    end: int
    arrays: Mapping[str, NDArray[Any]]
    parameters: Mapping[str, int]
    lengths_BF: NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A call's columns, proved to be the model's.

    Attributes:
        features: The model's that the call has, in the order of KEYS.
        own: Whether columns that the node makes are left out.
        keys: The keys of each of `features`.
        dense_BD: None where requests carry none.
        once: Names of the features, and of columns of DENSE, that requests carry once, as they are
            the context's: such a feature's `keys` are of one row. Empty: each row has all columns.
    """

    schema: Schema
    table: Table
    features: Sequence[Feature]
    own: bool
    keys: Sequence[Keys]
    dense_BD: NDArray[np.float32] | None
    size: int
    once: frozenset[str] = frozenset()


def read(
    schema: Schema,
    features: Any,
    weights: Mapping[str, Any] | None = None,
    dense: Any = None,
    context: Mapping[str, Any] | None = None,
    *,
    repeat: bool = False,
) -> Columns:
    """Take the model's columns from what a caller gave (`Client.rank`).

    A context is carried once if it has all columns that the model lets it, unless it is to be
    repeated in each row.

    Raises:
        InputError: A column is missing, unknown, or holds what cannot be sent.
    """
    table, common = open_table(features), _context(context)
    _check_apart(table, common)
    there = {*table.names, *common}
    made = {feature.name for feature in schema.features if feature.made}
    own = bool(made) and not made & there
    wanted = [feature for feature in schema.features if not (own and feature.made)]
    names = [feature.name for feature in wanted]
    _check_names(schema, table, common, wanted, weights or {}, dense)
    # Bins are made of amounts, below; a caller may have worked them out, as all had to once.
    given = [feature.name for feature in wanted if feature.bins is None or feature.name in there]
    texts = {feature.name for feature in wanted if feature.text}
    keys = {name: _keys(table, common, name, weights or {}, text=name in texts) for name in given}
    for feature in wanted:
        if feature.weighed and keys[feature.name].weights_N is None:
            raise InputError(
                f"feature {feature.name!r} of model {schema.model!r} is weighed: give "
                f"weights={{{feature.name!r}: ...}}"
            )
    size = _size(schema, table, common, keys, dense)
    once = frozenset() if repeat else contexts.once(schema, common, dense, own=own)
    repeated = {*common} - once
    whole = {n: keys[n].repeated(size) if n in repeated else keys[n] for n in given}
    dense_BD = _dense(schema, table, common, dense, own, size)
    for feature in wanted:
        if feature.bins is not None and (feature.name not in given or dense_BD is not None):
            amount_B = _amounts(schema, table, common, feature, dense_BD, size)
            amount_B = amount_B[:1] if feature.name in once else amount_B
            if feature.name in given:
                amount = schema.amount_of(feature.bins)
                feature.bins.check(feature.name, whole[feature.name], amount, amount_B)
            else:
                whole[feature.name] = Keys(feature.bins.keys_of(amount_B))
    sent = [whole[name] for name in names]
    return Columns(schema, table, wanted, own, sent, dense_BD, size, once)


def _size(
    schema: Schema, table: Table, common: Mapping[str, Any], keys: Mapping[str, Keys], dense: Any
) -> int:
    """Return how many rows a call has: as its columns, all of one length."""
    sizes = {name: len(column) for name, column in keys.items() if name not in common}
    if not sizes:  # rows may differ in their amounts alone
        for name in _dense_names(schema, dense) or ():
            if name in table.names:
                sizes[name] = len(_numbers(table, common, name))
    if not sizes:
        raise InputError(
            f"all features of model {schema.model!r} are in the context; give those that differ "
            "from row to row as columns"
        )
    size = next(iter(sizes.values()))
    if size == 0:
        raise InputError(f"there is no row; a call of model {schema.model!r} has one or more")
    if len(set(sizes.values())) > 1:
        raise InputError(
            f"columns differ in length: {sizes}; what all rows have in common goes into context="
        )
    return size


def _amounts(
    schema: Schema,
    table: Table,
    common: Mapping[str, Any],
    feature: Feature,
    dense_BD: NDArray[np.float32] | None,
    size: int,
) -> NDArray[np.float32]:
    """Return the amounts that a feature is the bin of: those of DENSE, or a column where none is.

    A model that is only looked up has no DENSE.
    """
    assert feature.bins is not None, "a feature of bins"
    if dense_BD is not None:
        return dense_BD[:, feature.bins.dense]
    name = schema.amount_of(feature.bins)
    if name not in table.names and name not in common:
        raise InputError(
            f"feature {feature.name!r} is missing: it is the bin of {name!r}; give that"
        )
    return _column(table, common, name, size)


def _context(context: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a context, empty where none was given."""
    if context is not None and not isinstance(context, Mapping):
        raise InputError(
            f"context is a {type(context).__name__}; give a mapping of one value by name"
        )
    return context or {}


def _check_apart(table: Table, common: Mapping[str, Any]) -> None:
    """Refuse a column that is in the context, too."""
    both = sorted({*table.names} & {*common})
    if both:
        raise InputError(f"{both[0]!r} is in the context and a column; give it once")


def _keys(
    table: Table, common: Mapping[str, Any], name: str, weights: Mapping[str, Any], *, text: bool
) -> Keys:
    """Return the keys of a feature: of all rows, or one row of them for the context."""
    if name not in common:
        weighing = _weights(table, weights.get(name))
        return keys_of(f"feature {name!r}", table.column(name), weighing, text=text)
    weighing = [weights[name]] if name in weights else None
    return keys_of(f"feature {name!r} of the context", [common[name]], weighing, text=text)


def _check_names(
    schema: Schema,
    table: Table,
    common: Mapping[str, Any],
    wanted: Sequence[Feature],
    weights: Mapping[str, Any],
    dense: Any,
) -> None:
    there = {*table.names, *common}
    names = [feature.name for feature in wanted if feature.bins is None]
    missing = [name for name in names if name not in there]
    takes = f"model {schema.model!r} takes {', '.join(names)}"
    if missing:
        raise InputError(f"feature {missing[0]!r} is missing; {takes}; there are {sorted(there)}")
    for name in weights:
        if name not in names:
            raise InputError(f"weights are of feature {name!r}, which is unknown; {takes}")
    columns = [dense] if isinstance(dense, str) else dense
    named = {n for n in columns if isinstance(n, str)} if isinstance(columns, list) else set()
    known = {*(feature.name for feature in wanted), *(schema.dense or ()), *named}
    known |= _strings(weights)
    unknown = sorted(({*table.names} if table.strict else set()) - known) + sorted(
        {*common} - known
    )
    if unknown:
        more = f", and of DENSE {', '.join(schema.dense)}" if schema.dense else ""
        raise InputError(f"feature {unknown[0]!r} is unknown; {takes}{more}")


def _strings(weights: Mapping[str, Any]) -> set[str]:
    return {each for each in weights.values() if isinstance(each, str)}


def _weights(table: Table, weights: Any) -> Any:
    """Return weights that are given, or those in the column that is named."""
    if not isinstance(weights, str):
        return weights
    if weights not in table.names:
        raise InputError(f"weights are to be in column {weights!r}; there are {table.names}")
    return table.column(weights)


def _dense(
    schema: Schema,
    table: Table,
    common: Mapping[str, Any],
    dense: Any,
    own: bool,
    size: int,
) -> NDArray[np.float32] | None:
    wanted = schema.dense_columns + (0 if own else schema.dense_made)
    if wanted == 0 or not schema.ranking:
        if dense is not None:
            raise InputError(f"model {schema.model!r} takes no dense features; leave dense out")
        return None
    names = _dense_names(schema, dense)
    if names is not None:
        missing = [name for name in names if name not in table.names and name not in common]
        if missing:
            raise InputError(
                f"dense feature {missing[0]!r} is missing; model {schema.model!r} takes "
                f"{', '.join(names)}: give NaN where a value is not known"
            )
        columns = [_column(table, common, name, size) for name in names]
        array = np.stack(columns, axis=1) if columns else np.zeros((size, 0), np.float32)
    elif dense is None:
        raise InputError(
            f"model {schema.model!r} takes {wanted} dense columns, and does not tell their names: "
            f"give dense, an array [{size}, {wanted}], or the names of its columns in their order"
        )
    else:
        array = _array(dense, size, wanted)
    if array.shape != (size, wanted):
        raise InputError(
            f"dense has shape {list(array.shape)}; model {schema.model!r} takes [{size}, {wanted}]"
        )
    return array


def _array(dense: Any, size: int, wanted: int) -> NDArray[np.float32]:
    """Return an array of floats; by way of 64 bits, as the trainer reads every amount."""
    try:
        numbers = np.asarray(dense, np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"dense is no array of numbers, [{size}, {wanted}]: {error}") from None
    with np.errstate(over="ignore"):
        return numbers.astype(np.float32)


def _dense_names(schema: Schema, dense: Any) -> Sequence[str] | None:
    """Return the names of DENSE's columns: the caller's, or the model's; None: neither has any."""
    if dense is None:
        return schema.dense
    named = isinstance(dense, (list, tuple)) and all(isinstance(name, str) for name in dense)
    return dense if named else None


def _column(table: Table, common: Mapping[str, Any], name: str, size: int) -> NDArray[np.float32]:
    """Return a column of numbers, `size` long where it is of the context."""
    numbers = _numbers(table, common, name)
    if name in common:
        return np.repeat(numbers, size)
    if len(numbers) != size:
        raise InputError(f"dense feature {name!r} has {len(numbers)} rows, other columns {size}")
    return numbers


def _numbers(table: Table, common: Mapping[str, Any], name: str) -> NDArray[np.float32]:
    """Return a column of numbers, as it is; of the context, one."""
    if name not in common:
        return floats_of(f"dense feature {name!r}", table.column(name))
    return floats_of(f"dense feature {name!r} of the context", [common[name]])


# --- requests -------------------------------------------------------------------------------------


def cut(
    columns: Columns, version: int | None = None, max_answer_bytes: int | None = None
) -> list[Request]:
    """Return the requests of a call, each within the model's bounds, in the order of the samples.

    Answers are at most `max_answer_bytes` long, too, if that is given.

    Raises:
        InputError: One sample alone is beyond them.
    """
    lengths_BF, once_F = _lengths(columns)
    jagged = any(c.lengths_B is not None or c.weights_N is not None for c in columns.keys)
    jagged = jagged or bool(columns.once)
    parameters = {} if version is None else {"version": version}
    if jagged and columns.own and not columns.once:
        # Only the shape of a rectangular request says which columns it has.
        parameters["columns"] = len(columns.features)
    starts = [np.concatenate([[0], np.cumsum(_sizes(c))]) for c in columns.keys]
    build = _with_context if columns.once else _jagged if jagged else _rectangular
    requests = []
    for begin, end in _ranges(columns, lengths_BF, once_F, jagged, max_answer_bytes):
        counted_BF = lengths_BF[begin:end]
        if columns.once:
            counted_BF = counted_BF.copy()
            counted_BF[0] += once_F
        arrays = build(columns, starts, begin, end)
        requests.append(Request(begin, end, arrays, parameters, counted_BF))
    return requests


def _sizes(column: Keys) -> NDArray[np.int64]:
    if column.lengths_B is None:
        return np.ones(len(column), np.int64)
    return column.lengths_B.astype(np.int64)


def _lengths(columns: Columns) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the keys of each sample and feature, and those that a request has once.

    A column that is made counts as one key a sample; of which side it is, only nodes know.
    """
    schema = columns.schema
    lengths_BF = np.ones((columns.size, len(schema.features)), np.int64)
    once_F = np.zeros(len(schema.features), np.int64)
    at = {feature.name: f for f, feature in enumerate(schema.features)}
    for feature, column in zip(columns.features, columns.keys, strict=True):
        if feature.name in columns.once:
            once_F[at[feature.name]] = _sizes(column)[0]
            lengths_BF[:, at[feature.name]] = 0
        else:
            lengths_BF[:, at[feature.name]] = _sizes(column)
    return lengths_BF, once_F


def _ranges(
    columns: Columns,
    lengths_BF: NDArray[np.int64],
    once_F: NDArray[np.int64],
    jagged: bool,
    max_answer_bytes: int | None,
) -> Iterator[tuple[int, int]]:
    schema = columns.schema
    most = schema.max_samples if jagged else min(schema.max_batch, schema.max_samples)
    dims_F = np.array([feature.dim for feature in schema.features], np.int64)
    pooled_F = np.array([feature.pooling != "none" for feature in schema.features])
    # As the node counts: embeddings, which scores are made from, a source a key, scores, version.
    bytes_B = 4 * np.where(pooled_F, dims_F, lengths_BF * dims_F).sum(axis=1)
    bytes_B += lengths_BF.sum(axis=1) + 4 * len(schema.heads) + 8
    most_bytes = min(schema.max_output_bytes, max_answer_bytes or schema.max_output_bytes)
    keys_once = int(once_F.sum())
    bytes_once = keys_once + 4 * int(dims_F.sum()) if columns.once else 0
    bounds = (
        (lengths_BF.sum(axis=1), schema.max_keys - keys_once),
        (bytes_B, most_bytes - bytes_once),
    )
    for (each_B, bound), of_context, what in zip(
        bounds, (keys_once, bytes_once), ("keys", "bytes of output"), strict=True
    ):
        if (each_B > bound).any():
            row = int(np.flatnonzero(each_B > bound)[0])
            raise InputError(
                f"row {row} alone has {each_B[row] + of_context} {what}; model {schema.model!r} "
                f"takes {bound + of_context} in a request"
            )
    ends = [np.concatenate([[0], np.cumsum(each_B)]) for each_B, _ in bounds]
    begin = 0
    while begin < columns.size:
        end = min(begin + most, columns.size)
        for sums, (_, bound) in zip(ends, bounds, strict=True):
            fits = int(np.searchsorted(sums, sums[begin] + bound, side="right")) - 1
            end = min(end, fits)
        yield begin, end
        begin = end


def _rectangular(
    columns: Columns, starts: Sequence[NDArray[np.int64]], begin: int, end: int
) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {
        "KEYS": np.stack([column.keys_N[begin:end] for column in columns.keys], axis=1)
    }
    if columns.dense_BD is not None and columns.dense_BD.shape[1]:
        arrays["DENSE"] = columns.dense_BD[begin:end]
    return arrays


def _jagged(
    columns: Columns, starts: Sequence[NDArray[np.int64]], begin: int, end: int
) -> dict[str, NDArray[Any]]:
    arrays = _bags(columns.keys, starts, begin, end, lengths=columns.schema.lengths)
    if columns.dense_BD is not None and columns.dense_BD.shape[1]:
        arrays["DENSE"] = columns.dense_BD[begin:end].reshape(1, -1)
    return arrays


def _with_context(
    columns: Columns, starts: Sequence[NDArray[np.int64]], begin: int, end: int
) -> dict[str, NDArray[Any]]:
    """Return a request of one context and its candidates; where bags have one key, no lengths."""
    arrays: dict[str, NDArray[Any]] = {}
    rows = {"CONTEXT_": (0, 1), "": (begin, end)}
    for prefix, (first, last) in rows.items():
        of = [
            f
            for f, each in enumerate(columns.features)
            if (each.name in columns.once) == bool(prefix)
        ]
        mine = [columns.keys[f] for f in of], [starts[f] for f in of]
        side = _bags(*mine, first, last, lengths="LENGTHS")
        if (side["LENGTHS"] == 1).all():
            del side["LENGTHS"]
        if columns.dense_BD is not None:
            names = columns.schema.dense or [""] * columns.dense_BD.shape[1]
            at = [d for d, name in enumerate(names) if (name in columns.once) == bool(prefix)]
            if at:
                side["DENSE"] = columns.dense_BD[first:last, at].reshape(1, -1)
        arrays |= {prefix + name: array for name, array in side.items()}
    return {**arrays, "CANDIDATES": np.array([[end - begin]], np.int32)}


def _bags(
    columns: Sequence[Keys],
    starts: Sequence[NDArray[np.int64]],
    begin: int,
    end: int,
    *,
    lengths: str,
) -> dict[str, NDArray[Any]]:
    """Return the tensors of the bags of some rows; their lengths' by the name that is given."""
    lengths_BF = np.stack([_sizes(c)[begin:end] for c in columns], axis=1)
    weighed = any(column.weights_N is not None for column in columns)
    places = places_of(lengths_BF)
    keys_N = np.zeros(int(lengths_BF.sum()), np.int64)
    weights_N = np.ones(len(keys_N), np.float32)
    for column, start, place in zip(columns, starts, places, strict=True):
        part = slice(int(start[begin]), int(start[end]))
        keys_N[place] = column.keys_N[part]
        if column.weights_N is not None:
            weights_N[place] = column.weights_N[part]
    arrays: dict[str, NDArray[Any]] = {
        "KEYS": keys_N.reshape(1, -1),
        lengths: lengths_BF.astype(np.int32).reshape(1, -1),
    }
    if weighed:
        arrays["WEIGHTS"] = weights_N.reshape(1, -1)
    return arrays


def places_of(widths_BF: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return for each feature where its values lie.

    They lie sample by sample, feature by feature; `widths_BF` says how many values
    each sample has of each feature.
    """
    ends = np.cumsum(widths_BF.reshape(-1)).reshape(widths_BF.shape)
    begins_BF = ends - widths_BF
    places = []
    for begins_B, widths_B in zip(begins_BF.T, widths_BF.T, strict=True):
        before_B = np.cumsum(widths_B) - widths_B
        within_N = np.arange(int(widths_B.sum())) - np.repeat(before_B, widths_B)
        places.append(np.repeat(begins_B, widths_B) + within_N)
    return places


# --- answers --------------------------------------------------------------------------------------


def scores_of(parts: Sequence[NDArray[np.float32]], columns: Columns) -> NDArray[np.float32]:
    """Return the scores of a call.

    Raises:
        ClientError: They are not as many as the samples.
    """
    scores_B: NDArray[np.float32] = np.concatenate([np.ravel(part) for part in parts])
    if len(scores_B) != columns.size:
        raise ClientError(
            f"model {columns.schema.model!r} gave {len(scores_B)} scores for {columns.size} rows"
        )
    return scores_B


def sources_of(
    parts: Sequence[NDArray[np.uint8]], requests: Sequence[Request], schema: Schema
) -> dict[str, NDArray[np.uint8]]:
    """Return for each feature where the row of each of its keys came from, in their order."""
    by_name: dict[str, list[NDArray[np.uint8]]] = {name: [] for name in schema.names}
    for part, request in zip(parts, requests, strict=True):
        flat = _whole(np.asarray(part, np.uint8), request.lengths_BF, schema, "SOURCE")
        for name, place in zip(schema.names, places_of(request.lengths_BF), strict=True):
            by_name[name].append(flat[place])
    return {name: np.concatenate(found) for name, found in by_name.items()}


def embeddings_of(
    parts: Sequence[NDArray[np.float32]], requests: Sequence[Request], schema: Schema
) -> dict[str, Any]:
    """Return for each feature its vectors, [B, dim]; where pooling is none a list of [n, dim]."""
    by_name: dict[str, list[Any]] = {name: [] for name in schema.names}
    for part, request in zip(parts, requests, strict=True):
        widths_BF = np.ones_like(request.lengths_BF)
        for f, feature in enumerate(schema.features):
            rows_B = request.lengths_BF[:, f] if feature.pooling == "none" else widths_BF[:, f]
            widths_BF[:, f] = rows_B * feature.dim
        flat = _whole(np.asarray(part, np.float32), widths_BF, schema, "EMBEDDING")
        for f, (feature, place) in enumerate(
            zip(schema.features, places_of(widths_BF), strict=True)
        ):
            rows = flat[place].reshape(-1, feature.dim)
            if feature.pooling == "none":
                by_name[feature.name] += np.split(rows, np.cumsum(request.lengths_BF[:-1, f]))
            else:
                by_name[feature.name].append(rows)
    return {
        feature.name: by_name[feature.name]
        if feature.pooling == "none"
        else np.concatenate(by_name[feature.name])
        for feature in schema.features
    }


def _whole(
    part: NDArray[Any], widths_BF: NDArray[np.int64], schema: Schema, what: str
) -> NDArray[Any]:
    flat = part.reshape(-1)
    if len(flat) != int(widths_BF.sum()):
        raise ClientError(
            f"model {schema.model!r} gave {len(flat)} values of {what} where {widths_BF.sum()} "
            "were expected: has its schema changed? make a new client"
        )
    return flat
