"""`embertide serve --spans-to`: what each front end is told, and what is refused beforehand."""

from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

from embertide import serving
from embertide.server.adapters import server_command
from embertide.server.adapters.installation import find_installation
from embertide.server.adapters.server_command import ServerOptions, TritonError
from embertide.server.cli.app import app

URL = "http://collector:4318/v1/traces"
OWN_URL = "http://collector:4317"


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
    ("url", "collector"),
    [
        (OWN_URL, "collector:4317"),
        (f"{OWN_URL}/", "collector:4317"),
        ("http://collector", "collector:4317"),
        ("http://[::1]:9", "[::1]:9"),
    ],
)
def test_our_own_is_told_the_same(url: str, collector: str) -> None:
    def told(given: ServerOptions) -> list[str]:
        line, _ = server_command.command(given, find_installation())
        return [each for each in line if each.startswith("--spans")]

    assert told(options(front="own")) == []
    given = options(spans_to=url, spans_every=100, front="own")
    server_command.check(given, find_installation())
    assert told(given) == [f"--spans-to={collector}", "--spans-every=100"]


def test_serve_of_python_hands_both_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    given: list[ServerOptions] = []

    def server(made: ServerOptions) -> None:
        given.append(made)
        raise TritonError("seen")

    monkeypatch.setattr(serving, "TritonServer", server)
    monkeypatch.setattr(serving, "newest_snapshot", lambda path: path)
    monkeypatch.setattr(serving, "schema_of", lambda path: None)
    with pytest.raises(TritonError, match="seen"):
        serving.serve(tmp_path, model="news", spans_to=OWN_URL, spans_every=7)
    assert [(each.spans_to, each.spans_every) for each in given] == [(OWN_URL, 7)]


@pytest.mark.parametrize(
    "url",
    [
        *("collector:4318", "https://collector/v1/traces", "http:///v1"),
        *("http://c:0/v1/traces", "http://c:99999/v1/traces", "http://c/v1 traces", ""),
        *("http://c/v1/traces,mode=triton", "http://c/v1/traces?x=1", "http://[::1/v1"),
    ],
)
def test_a_place_that_takes_no_spans_is_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(TritonError, match=r"--spans-to .*http://HOST:4318/v1/traces"):
        server_command.check(options(spans_to=url), find_installation())
    with pytest.raises(TritonError, match=r"--spans-to .*http://HOST:4317"):
        server_command.check(options(spans_to=url, front="own"), find_installation())


def test_the_form_of_the_other_front_end_is_refused_with_the_remedy() -> None:
    remedy = r"OTLP over gRPC; give http://HOST:4317,.*or serve by --front triton"
    with pytest.raises(TritonError, match=remedy):
        server_command.check(options(spans_to=URL, front="own"), find_installation())
    remedy = r"OTLP over HTTP; give http://HOST:4318/v1/traces, or serve by --front own"
    for url in (OWN_URL, f"{OWN_URL}/"):
        with pytest.raises(TritonError, match=remedy):
            server_command.check(options(spans_to=url), find_installation())


def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(TritonError, match="--spans-to") as caught:
        server_command.check(options(spans_to="http://me:hush@c/v1/traces"), find_installation())
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("front", ["own", "triton"])
def test_spans_of_nobody_are_refused(front: Literal["own", "triton"]) -> None:
    with pytest.raises(TritonError, match=r"--spans-every 5.*--spans-to"):
        server_command.check(options(spans_every=5, front=front), find_installation())


def test_help_names_both() -> None:
    text = CliRunner().invoke(app, ["serve", "--help"]).output
    assert "--spans-to" in text
    assert "--spans-every" in text
