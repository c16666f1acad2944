"""The record of an operation, read by the names of nodes.

A record (docs/formats.md) keeps positions, and the names of the nodes at them; positions of today's
plan may be others. Nothing but this module reads the positions of a record.
"""

from collections.abc import Iterable, Mapping, Sequence

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.layout import Bucket, owner
from embertide.server.core.plan.names import Device, NamedMove, Roster, names_of
from embertide.server.core.plan.shares import ShareKey
from embertide.v1 import control_pb2, plan_pb2


class NamedOperation:
    """An operation whose moves, loads and shares name nodes by name.

    It reads the record as it is when it is asked; only the names are taken when it is made.
    """

    def __init__(self, record: control_pb2.OperationRecord) -> None:
        """Take the record. Requires: it names its nodes, or has no moves that are asked for."""
        self.record = record
        self._names = list(record.nodes)

    def device(self, at: plan_pb2.Owner) -> Device:
        """Return the device that the record means by a position."""
        return Device(self._names[at.node], at.device)

    def move(self, message: control_pb2.BucketMove) -> NamedMove:
        """Return one of the record's moves."""
        return NamedMove(
            at=Bucket(message.table_id, message.bucket),
            source=self.device(message.source) if message.HasField("source") else None,
            target=self.device(message.target) if message.HasField("target") else None,
            bytes=message.bytes,
            freed_bytes=message.freed_bytes,
        )

    def moves(self, begin: int = 0, count: int | None = None) -> list[NamedMove]:
        """Return some of the moves; to read 100,000 takes longer than a tick may."""
        end = None if count is None else begin + count
        return [self.move(each) for each in self.record.moves[begin:end]]

    def targets(self) -> set[str]:
        """Return the names of the nodes that get buckets."""
        to = {each.target.node for each in self.record.moves if each.HasField("target")}
        return {self._names[position] for position in to if position < len(self._names)}

    def loads(self) -> list[tuple[Device, int, int]]:
        """Return the bytes of each device before all moves, and after them."""
        return [
            (self.device(each.device), each.bytes_before, each.bytes_after)
            for each in self.record.devices
        ]

    def find_shares(
        self, shares: Iterable[plan_pb2.TierShare], roster: Roster
    ) -> tuple[dict[ShareKey, int], list[Device]]:
        """Return shares of the record at today's places, and the devices that are not there."""
        found, missing = {}, []
        for each in shares:
            device = self.device(each.device)
            place = roster.find(device)
            if place is None:
                missing.append(device)
            else:
                found[ShareKey(place, each.tier, each.table_id)] = each.bytes
        return found, missing

    def share_messages(
        self, shares: Mapping[ShareKey, int], roster: Roster
    ) -> Sequence[plan_pb2.TierShare]:
        """Write shares at today's places as the record does. Requires: it names their nodes."""
        position = {name: at for at, name in enumerate(self._names)}
        messages = []
        for each in sorted(shares):
            device = roster.device(each.device)
            messages.append(
                plan_pb2.TierShare(
                    device=plan_pb2.Owner(node=position[device.node], device=device.device),
                    tier=each.tier,
                    table_id=each.table,
                    bytes=shares[each],
                )
            )
        return messages

    def request_now(self, topology: plan_pb2.Topology) -> control_pb2.StartReshardRequest:
        """Return the request, with the positions of a target in today's topology.

        Raises:
            RefusedError: It names a node or a device that has left.
        """
        request = self.record.request
        if request.WhichOneof("goal") != "target" or self._names == names_of(topology):
            return request
        if not self._names:
            raise RefusedError(
                Code.FAILED_PRECONDITION,
                "the plan that its target was made from is not kept: give it again",
            )
        roster = Roster(topology)
        now = control_pb2.StartReshardRequest()
        now.CopyFrom(request)
        named = [at for each in now.target.assignments for at in each.owners]
        for at in (*named, *(each.device for each in now.target.tier_shares)):
            device = self.device(at) if at.node < len(self._names) else None
            place = roster.find(device) if device is not None else None
            if place is None:
                raise RefusedError(
                    Code.FAILED_PRECONDITION,
                    f"its target names {device or at.node}, which has left the fleet",
                )
            at.CopyFrom(owner(place))
        return now
