"""Addresses, ports and names in options are looked at before anything starts; IPv6 works."""

import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from embertide.server.adapters import server_command
from embertide.server.adapters.installation import find_installation
from embertide.server.adapters.process import ProcessError, check_port
from embertide.server.adapters.triton import ServerOptions
from embertide.server.cli.app import app

ODD_ADDRESSES = ("127.0.0.1", "::1", "::1:7070", "a:70000", "a:-1", "a:x", ":1", "a:1:2", "[::1]")
# By command, the options that are HOST:PORT.
ADDRESSES = {
    ("serve", "nowhere"): ("--control", "--peer", "--peer-listen", "--health-listen"),
    ("control",): ("--listen", "--advertise", "--health-listen"),
    ("status",): ("--control",),
    ("hot",): ("--control",),
    ("node", "list"): ("--control",),
    ("reshard", "list"): ("--control",),
    ("plan", "show"): ("--control",),
    ("explain", "item", "1"): ("--node", "--control"),
}
PORTS = {
    ("serve", "nowhere"): ("--http-port", "--grpc-port", "--metrics-port"),
    ("demo",): ("--grpc-port", "--metrics-port", "--control-port"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERTIDE_CONFIG", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def refused(*words: str) -> str:
    done = CliRunner().invoke(app, words, prog_name="embertide")
    assert done.exit_code == 2, (words, done.output, done.exception)
    assert not list(Path.cwd().iterdir())  # nothing was begun
    return " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize("command", ADDRESSES, ids=" ".join)
def test_an_odd_address_is_refused(command: tuple[str, ...]) -> None:
    for option in ADDRESSES[command]:
        for odd in ODD_ADDRESSES:
            said = refused(*command, option, odd)
            assert f"Invalid value for '{option}'" in said, (option, odd, said)


@pytest.mark.parametrize("command", PORTS, ids=" ".join)
def test_an_odd_port_is_refused(command: tuple[str, ...]) -> None:
    for option in PORTS[command]:
        for odd in ("70000", "99999", "-1", "x", str(1 << 70)):
            assert f"Invalid value for '{option}'" in refused(*command, option, odd)


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "[::1]:8000", "", "a:b"])
def test_a_host_has_no_port(host: str) -> None:
    assert "give an address alone" in refused("serve", "nowhere", "--host", host)


@pytest.mark.parametrize("name", ["[/b]", "\x1b[2J", "a/b", "", "x" * 200])
def test_names_are_names(name: str) -> None:
    for option in ("--node", "--name"):
        assert "is no name" in refused("serve", "nowhere", option, name)


def test_ports_are_tried_where_they_will_be_listened_on() -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as taken:
            taken.bind((host, 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ProcessError, match=f"http port {port} is in use on {host}"):
                check_port("http", host, port)
        check_port("http", host, port)
    for host in ("no.such.host.example", "192.0.2.1", "\x00"):
        with pytest.raises(ProcessError, match="give one"):
            check_port("http", host, 0)
    for port in (70_000, 99_999, -1):
        with pytest.raises(ProcessError, match="give one from 1 to 65535"):
            check_port("http", "127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "evhtp", "reached"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1:8000"),
        ("0.0.0.0", "0.0.0.0", "127.0.0.1:8000"),
        ("::1", "ipv6:::1", "[::1]:8000"),
        ("::", "ipv6:::", "[::1]:8000"),
    ],
)
def test_triton_is_told_and_reached_by_ipv6(host: str, evhtp: str, reached: str) -> None:
    options = ServerOptions(repository=Path(), backends=Path(), log=Path(), host=host)
    assert options.evhtp_host() == evhtp
    assert options.reached(8000) == reached


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"front": "triton", "tls": Path("certificates")}, "asks nobody who he is"),
        ({"front": "triton", "known_callers": True}, "or serve by --front own"),
        ({"known_callers": True}, "nobody could say who he is; give --front-tokens"),
        ({"host": "0.0.0.0", "tokens": Path("tokens")}, "in plain text: give --front-tls"),
        ({"host": "node.example", "tokens": Path("tokens")}, "or --plaintext on a network"),
    ],
)
def test_callers_cannot_be_asked_who_they_are_so(given: dict[str, Any], why: str) -> None:
    options = ServerOptions(repository=Path(), backends=Path(), log=Path(), **given)
    with pytest.raises(ProcessError, match=why):
        server_command.check(options, find_installation())


def test_the_front_end_is_told_how_callers_are_known() -> None:
    given: dict[str, Any] = {
        "tls": Path("certificates"),
        "tokens": Path("tokens"),
        "known_callers": True,
        "caller_calls": 7,
        "caller_bytes": 1 << 20,
    }
    options = ServerOptions(repository=Path(), backends=Path(), log=Path(), **given)
    words, _ = server_command.command(options, find_installation(), Path("/run/own.sock"))
    assert {
        "--tls=certificates",
        "--tokens=tokens",
        "--known-callers",
        "--max-calls-of-one=7",
        "--max-bytes-of-one=1048576",
        "--own-socket=/run/own.sock",
    } <= set(words)
    plain = ServerOptions(repository=Path(), backends=Path(), log=Path())
    assert not plain.asks_callers()
    words, _ = server_command.command(plain, find_installation())
    names = {word.partition("=")[0] for word in words}
    assert names.isdisjoint({"--tls", "--tokens", "--known-callers", "--own-socket"})
