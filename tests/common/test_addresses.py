"""Which addresses are of this machine, and what HOST:PORT means."""

import pytest

from embertide._common import addresses


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST", "127.0.0.1", "127.8.9.1", "::1", "[::1]"]
)
def test_this_machine(host: str) -> None:
    assert addresses.is_this_machine(host)


@pytest.mark.parametrize(
    "host",
    [
        "localhost.evil.example",
        "127.evil.example",
        "127.0.0.1.evil.example",
        "0.0.0.0",
        "::",
        "",
        "10.0.0.1",
    ],
)
def test_another_machine(host: str) -> None:
    assert not addresses.is_this_machine(host)


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("unix:/run/node.sock", True),
        ("unix:x,10.0.0.1:1", False),
        ("localhost:8001", True),
        ("[::1]:8001", True),
        ("localhost.evil.example:8001", False),
        ("ipv4:127.0.0.1:1,10.0.0.1:1", False),
        ("dns:localhost:1", False),
        ("127.0.0.1", False),
    ],
)
def test_local_targets_of_grpc(target: str, local: bool) -> None:
    assert addresses.is_local_target(target) is local


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:0", ("::1", 0)),
        ("node-0.nodes:65535", ("node-0.nodes", 65535)),
    ],
)
def test_host_and_port(text: str, parts: tuple[str, int]) -> None:
    assert addresses.split_address(text) == parts
    assert addresses.join_address(*parts) == text


@pytest.mark.parametrize(
    "text",
    ["::1:80", "host", ":80", "host:", "host:65536", "host:99999", "host:-1", "host:8o", "host:²"],
)
def test_what_is_no_address_says_what_would_be(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|from 0 to 65535"):
        addresses.split_address(text)
