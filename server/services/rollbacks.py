"""Orders to roll back: proved here, written to the bus, carried out by the trainer."""

from typing import Protocol

import redis

from embertide.server.core.errors import Code, RefusedError, invalid
from embertide.server.core.idempotency import check_id
from embertide.server.core.news import RollbackNews, trainer_state
from embertide.server.core.reshard import check_reason
from embertide.v1 import control_pb2, update_pb2

_BY_HAND = (
    "run `embertide rollback VERSION --publication FOLDER --bus URL` where the publication is"
)


class RollbackBus(Protocol):
    """Reads and writes orders to roll back; a redis.RedisError: the bus does not answer."""

    def newest(self) -> update_pb2.Version | None:
        """Return the newest version; None: there is none, or it cannot be known now."""

    def trainer(self) -> control_pb2.TrainerStatus | None:
        """Return the trainer; None: there is none, or it cannot be known now."""

    def rollback(self) -> RollbackNews:
        """Return the order that waits, and what has become of the last one taken."""

    def order_rollback(self, order: update_pb2.RollbackOrder) -> None:
        """Order a version to be restored, unless another order waits."""


def start_rollback(
    request: control_pb2.StartRollbackRequest,
    bus: RollbackBus | None,
    known: control_pb2.ListVersionsResponse,
    author: str,
    now_ms: int,
) -> control_pb2.StartRollbackResponse:
    """Order a version to be restored, or only say what would be done.

    Args:
        request: What is asked for.
        bus: Where orders go; None: none is named.
        known: The versions that are known.
        author: Who asks.
        now_ms: Wall clock.

    Raises:
        RefusedError: As control.proto lists them.
    """
    check_id("id", request.id)
    check_reason(request.reason)
    if not request.version:
        raise invalid("version is 0; give the number of a version, as ListVersions has it")
    if bus is None:
        raise _precondition(f"this control plane has no --bus to order it on: {_BY_HAND}")
    newest, trainer = bus.newest(), bus.trainer()
    if newest is None:
        raise _precondition("no version is known: the bus has none, or does not answer")
    if request.version >= newest.number:
        raise _precondition(
            f"version {request.version} is not older than {newest.number}, the newest: name an "
            "older one"
        )
    if trainer is None or trainer_state(trainer) != "alive":
        state = "none is known" if trainer is None else f"the last one is {trainer_state(trainer)}"
        raise _precondition(f"no trainer lives to carry it out ({state}): {_BY_HAND}")
    if trainer.sign.lineage < newest.lineage:
        raise _precondition(
            f"the trainer on {trainer.sign.host} is ending, for version {newest.number} is of "
            f"another publisher: start it again; or {_BY_HAND}"
        )
    order = update_pb2.RollbackOrder(
        id=request.id,
        version=request.version,
        author=author,
        reason=request.reason,
        ordered_ms=now_ms,
    )
    try:
        is_there = _is_ordered(order, bus.rollback(), trainer)
        if not (request.dry_run or is_there):
            bus.order_rollback(order)
            _is_ordered(order, bus.rollback(), trainer)  # two may be written at once
    except redis.RedisError as error:
        raise RefusedError(Code.UNAVAILABLE, f"the bus takes no order now: {error}") from error
    version = next((v for v in known.versions if v.version.number == request.version), None)
    return control_pb2.StartRollbackResponse(newest=newest, trainer=trainer, version=version)


def _is_ordered(
    order: update_pb2.RollbackOrder, there: RollbackNews, trainer: control_pb2.TrainerStatus
) -> bool:
    """Return whether an order has been given already.

    Raises:
        RefusedError: Its id has another content, or another order is not done.
    """
    orders = [there.order] if there.order is not None else []
    if there.outcome is not None:
        orders.append(there.outcome.order)
    for each in orders:
        if each.id != order.id:
            continue
        if (each.version, each.reason) != (order.version, order.reason):
            raise RefusedError(
                Code.ALREADY_EXISTS, f"id {order.id!r} was used for another order: make a new one"
            )
        return True
    pending = there.order or _under_way(there, trainer)
    if pending is None:
        return False
    raise RefusedError(
        Code.ABORTED,
        f"another order is not done, to restore version {pending.version}, by "
        f"{pending.author or 'an operator'}: wait for its outcome",
    )


def _under_way(
    there: RollbackNews, trainer: control_pb2.TrainerStatus
) -> update_pb2.RollbackOrder | None:
    """Return the order that a trainer has taken and not ended; one who was killed never will."""
    if there.outcome is None or there.outcome.ended_ms:
        return None
    taken = there.outcome.order
    return taken if trainer.sign.started_ms <= taken.ordered_ms else None


def _precondition(why: str) -> RefusedError:
    return RefusedError(Code.FAILED_PRECONDITION, why)
