"""A served model that is asked by the trainer's commands: when it counts as loaded."""

import grpc
import pytest
from kserve_node import Node

from embertide.trainer.eval.served import ServedModel

ABSENT = (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'm' is not found")


@pytest.mark.parametrize("absent", [None, ABSENT], ids=["2.51", "2.72"])
def test_a_model_that_the_server_does_not_have_is_not_ready(
    absent: tuple[grpc.StatusCode, str] | None,
) -> None:
    """Of such a model 2.51 says that it is not ready, 2.72 an error (twins)."""
    node = Node()
    try:
        with ServedModel(node.url, "m") as model:
            assert model.ready()
            node.ready, node.absent = False, absent
            assert not model.ready()
            node.ready, node.absent = True, None
            assert model.ready()
    finally:
        node.stop()
    with ServedModel(node.url, "m") as model:
        assert not model.ready(), "nobody listens there"
