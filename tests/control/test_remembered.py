"""The memory of the control plane is bounded in number and in bytes."""

import pytest

from embertide.server.core import idempotency
from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.idempotency import Answers
from embertide.server.core.operations import Operations
from embertide.server.core.state import OPERATIONS_KEPT_BYTES
from embertide.v1 import control_pb2

Answer = control_pb2.RegisterNodeResponse
Request = control_pb2.RegisterNodeRequest


def request_of(bytes_: int) -> Request:
    return Request(model="m" * bytes_)


def test_a_large_request_is_remembered_by_its_digest() -> None:
    answers: Answers[Answer] = Answers()
    answer = Answer(incarnation="a")
    for i in range(100):
        answers.keep(f"id-{i}", request_of(100_000), answer, now_ms=0)
    assert answers.bytes < 100 * 200
    assert answers.find("id-7", request_of(100_000)) == answer
    with pytest.raises(RefusedError) as refused:
        answers.find("id-7", request_of(99_999))
    assert refused.value.code == Code.ALREADY_EXISTS


def test_the_oldest_answers_go_when_their_bytes_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idempotency, "KEPT_BYTES", 10_000)
    answers: Answers[Answer] = Answers()
    for i in range(50):
        answers.keep(f"id-{i}", request_of(1), Answer(incarnation="x" * 900), now_ms=0)
    assert 9_000 < answers.bytes <= 10_000
    assert answers.find("id-0", request_of(1)) is None
    assert answers.find("id-49", request_of(1)) is not None
    answers.keep("id-49", request_of(1), Answer(incarnation="x"), now_ms=0)
    assert answers.bytes <= 10_000 - 899, "an id that comes again is counted once"


def test_ended_operations_go_when_their_moves_take_too_many_bytes() -> None:
    operations = Operations({}, longest_deadline_ms=1, now_ms=0)
    for i in range(40):
        operation = control_pb2.Operation(
            id=f"op-{i}", created_ms=i + 1, ended_ms=i + 1, message="m" * (4 << 20)
        )
        operations.add(control_pb2.OperationRecord(operation=operation))
        assert operations.bytes <= OPERATIONS_KEPT_BYTES
    assert "op-0" not in operations.records
    assert operations.changed["op-0"] is None, "it goes from the state store, too"
    assert "op-39" in operations.records
    assert len(operations.records) == 15
