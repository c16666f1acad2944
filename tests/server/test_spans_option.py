"""`embertide serve --spans-to`: what tritonserver is told, and what is refused before it starts."""

from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

from embertide.server.adapters import server_command
from embertide.server.adapters.installation import find_installation
from embertide.server.adapters.server_command import ServerOptions, TritonError
from embertide.server.cli.app import app

URL = "http://collector:4318/v1/traces"


def options(
    *, spans_to: str | None = None, spans_every: int = 1, front: Literal["own", "triton"] = "triton"
) -> ServerOptions:
    here = Path()
    return ServerOptions(
        repository=here,
        backends=here,
        log=here / "log",
        front=front,
        spans_to=spans_to,
        spans_every=spans_every,
    )


def told(given: ServerOptions) -> list[str]:
    arguments = server_command.triton_arguments(given, Path())
    return [each for each in arguments if each.startswith("--trace")]


def test_triton_is_told_where_spans_go_and_of_how_many_requests() -> None:
    assert told(options()) == []
    assert told(options(spans_to=URL, spans_every=100)) == [
        "--trace-config=mode=opentelemetry",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=100",
        f"--trace-config=opentelemetry,url={URL}",
    ]
    server_command.check(options(spans_to=URL), find_installation())


@pytest.mark.parametrize(
    "url",
    [
        *("collector:4318", "https://collector/v1/traces", "http://collector:4318", "http:///v1"),
        *("http://c:0/v1/traces", "http://c:99999/v1/traces", "http://c/v1 traces", ""),
        *("http://c/v1/traces,mode=triton", "http://c/v1/traces?x=1", "http://[::1/v1"),
    ],
)
def test_a_place_that_takes_no_spans_is_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(TritonError, match=r"--spans-to .*http://HOST:4318/v1/traces"):
        server_command.check(options(spans_to=url), find_installation())


def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(TritonError, match="--spans-to") as caught:
        server_command.check(options(spans_to="http://me:hush@c/v1/traces"), find_installation())
    assert "hush" not in str(caught.value)


def test_spans_of_nobody_and_of_our_own_front_end_are_refused() -> None:
    with pytest.raises(TritonError, match=r"--spans-every 5.*--spans-to"):
        server_command.check(options(spans_every=5), find_installation())
    with pytest.raises(TritonError, match=r"--front triton.*embertide slow --trace"):
        server_command.check(options(spans_to=URL, front="own"), find_installation())


def test_help_names_both() -> None:
    text = CliRunner().invoke(app, ["serve", "--help"]).output
    assert "--spans-to" in text
    assert "--spans-every" in text
