"""A served model that is asked by the trainer's commands: when it counts as loaded."""

from typing import Any

import grpc
import pytest
import typer
from kserve_node import Node

from embertide.trainer.commands import guard, replay
from embertide.trainer.eval.served import ServedModel

ABSENT = (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'm' is not found")


@pytest.mark.parametrize("absent", [None, ABSENT], ids=["2.51", "2.72"])
def test_a_model_that_the_server_does_not_have_is_not_ready(
    absent: tuple[grpc.StatusCode, str] | None,
) -> None:
    """For such a model 2.51 says that it is not ready, 2.72 an error (twins)."""
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


@pytest.mark.parametrize("command", [guard.command, replay.command])
def test_what_the_environment_has_for_a_control_plane_goes_to_no_node(command: Any) -> None:
    app = typer.Typer()
    app.command()(command)
    options = {each.name: each for each in typer.main.get_command(app).params}
    for name in ("tls", "token_file"):
        assert options[name].envvar is None, name
