"""A state store that lost its keys: how it is noticed, and when a plan may be adopted from nodes.

A node takes no plan whose epoch is not above that of the one it has. So nodes that act by a later
plan than the store has would follow none of ours, and the store is not the one that they followed.
"""

from collections.abc import Iterable, Mapping, Sequence

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.fleet import FOUND_AGAIN_MS, Member
from embertide.server.core.plan.adoption import EPOCHS_ABOVE
from embertide.v1 import node_pb2


def plan_ahead(live: Iterable[Member], epoch: int) -> str:
    """Say which live nodes act by a later plan than ours, of an epoch; empty: none does."""
    epochs = {
        member.name: member.beat.plan_epoch
        for member in live
        if member.beat is not None and member.beat.plan_epoch > epoch
    }
    if not epochs:
        return ""
    first = min(epochs)
    more = f" and {len(epochs) - 1} more" if len(epochs) > 1 else ""
    ours = f"has plan {epoch}" if epoch else "has none"
    return (
        f"{first}{more} acts by plan {max(epochs.values())}, and `state` {ours}: it lost its "
        "keys, or --state is another store than the nodes'; in the first case run `embertide "
        "plan adopt`"
    )


def epoch_above(members: Iterable[Member], epoch: int) -> int:
    """Return an epoch that no node can have, given what they told and our plan's."""
    told = [member.beat.plan_epoch for member in members if member.beat is not None]
    return max(epoch, *told, 0) + EPOCHS_ABOVE


def check_adoption(
    live: Sequence[Member],
    loads: Mapping[str, node_pb2.NodeServiceGetLoadResponse],
    since_ms: int,
    epoch: int,
) -> None:
    """Prove that a plan may be made of what nodes hold.

    Args:
        live: The members that live.
        loads: The loads that those report, by name.
        since_ms: For how long this control plane has been there to be found.
        epoch: The epoch of our plan; 0: there is none.

    Raises:
        RefusedError: Not all live nodes are known or say what they hold, or they follow our plan.
    """

    def refused(why: str) -> RefusedError:
        return RefusedError(Code.FAILED_PRECONDITION, why)

    if since_ms < FOUND_AGAIN_MS:
        raise refused(
            f"this control plane began {since_ms / 1000:.0f} s ago, and nodes may take "
            f"{FOUND_AGAIN_MS // 1000} s to find it; wait, so that what they hold is theirs"
        )
    if not live:
        raise refused("no node lives that could say what it holds; start them")
    if silent := [each.name for each in live if each.name not in loads or each.beat is None]:
        raise refused(
            f"node {silent[0]!r} lives and does not say what it holds; wait for it, or stop it"
        )
    left = {each.name: each.beat.buckets_left for each in live if each.beat is not None}
    if loading := [name for name, buckets in left.items() if buckets]:
        raise refused(
            f"node {loading[0]!r} has {left[loading[0]]:,} buckets left to load of the plan "
            "that it acts by; wait for it, or stop it"
        )
    if not plan_ahead(live, epoch):
        raise refused(
            f"all live nodes act by plans that `state` has, up to {epoch}: there is "
            "nothing to adopt"
        )
