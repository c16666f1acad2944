"""The rules, by name. Each gives graphs that are equal to the one that it is given."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from embertide.trainer.model.rewrite.fold_norm import fold_norm
from embertide.trainer.model.rewrite.graph import Graph
from embertide.trainer.model.rewrite.hoist import hoist
from embertide.trainer.model.rewrite.merge_linears import merge_linears
from embertide.trainer.model.rewrite.split_elementwise import split_elementwise
from embertide.trainer.model.rewrite.split_interaction import split_interaction
from embertide.trainer.model.rewrite.split_linear import split_linear
from embertide.trainer.model.rewrite.split_sum import split_sum
from embertide.trainer.model.rewrite.straighten import straighten
from embertide.trainer.model.rewrite.user_weights import user_weights
from embertide.trainer.model.rewrite.widen_sum import widen_sum

Rule: TypeAlias = Callable[[Graph], Iterator[Graph]]

RULES: Mapping[str, Rule] = {
    "hoist": hoist,
    "straighten": straighten,
    "split linear": split_linear,
    "split interaction": split_interaction,
    "split sum": split_sum,
    "split function": split_elementwise,
    "widen sum": widen_sum,
    "merge linears": merge_linears,
    "fold normalisation": fold_norm,
}
RULES_OF_ONE_USER: Mapping[str, Rule] = {**RULES, "weights of a user": user_weights}
"""Those for a program of one user, too."""
