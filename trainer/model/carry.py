"""A net's tensors carried over to a net of other columns: what both have keeps its values.

Where a net's first layers meet its columns, the positions of a tensor's axes have names: dense
columns, values of features, pairs of features. A net gives them by `axes`. A position that the new
net has and the old one lacks is an input whose weight begins at 0, so that the new net gives the
scores that the old one gave, and learns from there (Net2Net's function-preserving growth, Chen et
al. 2016, arXiv:1511.05641). An input that is itself 0, as of a feature whose table begins empty,
keeps the fresh weight: the scores stay all the same, and it is learned as in a fresh net. Some of
the units behind it start fresh afterwards (renew.py).
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

Names = Sequence[str]
Axes = Mapping[str, tuple[Names | None, ...]]
"""By a tensor's name in the state_dict: the names of positions on each axis; None: the axis does
not depend on columns. A vector's value is `NAME:d`, a product of two vectors `NAME*OTHER`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Carried:
    """The result of carrying a net's tensors over.

    Attributes:
        tensors: For the new net's `load_state_dict`.
        grown: Names of those whose positions differ: what both nets have was kept.
        fresh: Names of those that begin anew.
    """

    tensors: dict[str, Tensor]
    grown: tuple[str, ...]
    fresh: tuple[str, ...]


def axes_of(net: nn.Module) -> Axes:
    """Return the names that a net gives to the positions of its tensors; none of a net without."""
    axes = getattr(net, "axes", None)
    return {} if axes is None else axes()


def carry(
    old: Mapping[str, Tensor],
    old_axes: Axes,
    net: nn.Module,
    empty: Collection[str] = frozenset(),
) -> Carried:
    """Return the tensors with which `net` goes on from those of an older net.

    Args:
        old: The older net's state_dict.
        old_axes: The result of that net's `axes_of`.
        net: The net that goes on, with its fresh values.
        empty: Features that read as zeros, for no key of theirs has a row.
    """
    axes = axes_of(net)
    tensors: dict[str, Tensor] = {}
    grown: list[str] = []
    fresh: list[str] = []
    for name, fresh_value in net.state_dict().items():
        before, after = old_axes.get(name), axes.get(name)
        value = old.get(name)
        kept: Tensor | None = None
        if value is not None and value.dtype == fresh_value.dtype:
            if value.shape == fresh_value.shape and _same(before, after):
                kept = value.clone()
            elif before is not None and after is not None:
                kept = _placed(value, before, fresh_value, after, empty)
                if kept is not None:
                    grown.append(name)
        if kept is None:
            fresh.append(name)
        tensors[name] = fresh_value.clone() if kept is None else kept
    return Carried(tensors, tuple(grown), tuple(fresh))


def _same(
    before: "tuple[Names | None, ...] | None", after: "tuple[Names | None, ...] | None"
) -> bool:
    if before is None or after is None:
        return before is after
    return [None if each is None else list(each) for each in before] == [
        None if each is None else list(each) for each in after
    ]


def _placed(
    old: Tensor,
    before: "tuple[Names | None, ...]",
    fresh: Tensor,
    after: "tuple[Names | None, ...]",
    empty: Collection[str] = frozenset(),
) -> Tensor | None:
    """Return `fresh` with the values of `old` where the names agree; None: they do not fit.

    Of a new input, the last axis of a matrix, the weight is 0, but for one that is 0 itself; of a
    new output the fresh values stay, but for what they take of old inputs.
    """
    if old.dim() != fresh.dim() or len(before) != old.dim() or len(after) != fresh.dim():
        return None
    from_axes: list[list[int]] = []
    to_axes: list[list[int]] = []
    for axis in range(old.dim()):
        names, new_names = before[axis], after[axis]
        if names is None or new_names is None:
            if old.shape[axis] != fresh.shape[axis]:
                return None
            from_axes.append(list(range(old.shape[axis])))
            to_axes.append(list(range(old.shape[axis])))
            continue
        if len(names) != old.shape[axis] or len(new_names) != fresh.shape[axis]:
            return None
        at = {name: i for i, name in enumerate(names)}
        pairs = [(at[name], i) for i, name in enumerate(new_names) if name in at]
        from_axes.append([a for a, _ in pairs])
        to_axes.append([b for _, b in pairs])
    out = fresh.clone()
    if out.dim() > 1:
        stays = torch.zeros(out.shape[-1], dtype=torch.bool)
        stays[to_axes[-1]] = True
        for i, name in enumerate(after[-1] or ()):
            stays[i] |= any(vector.partition(":")[0] in empty for vector in name.split("*"))
        out[..., ~stays] = 0
    out[_grid(to_axes)] = old[_grid(from_axes)]
    return out


def _grid(axes: list[list[int]]) -> tuple[Tensor, ...]:
    """Return an index of every combination of positions."""
    last = len(axes) - 1
    return tuple(
        torch.tensor(places, dtype=torch.long).reshape([-1] + [1] * (last - axis))
        for axis, places in enumerate(axes)
    )
