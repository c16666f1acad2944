"""Addresses: which are on this machine, and what `HOST:PORT` means. One rule for all callers."""

import ipaddress

_PORTS = range(65536)


def is_this_machine(host: str) -> bool:
    """Return whether a host is this machine whatever a name server says.

    True for `localhost` and for loopback addresses alone: `localhost.example.org`,
    `127.evil.example` and `0.0.0.0` are not.
    """
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def split_address(text: str, *, what: str = "address") -> tuple[str, int]:
    """Return host and port of `HOST:PORT` or `[IPV6]:PORT`, the host without brackets.

    Raises:
        ValueError: It is not of that form, or the port is not one of 0 to 65535.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        example = f"[{text}]:7070" if text.count(":") > 1 else "127.0.0.1:7070 or [::1]:7070"
        raise ValueError(f"{what} {text!r} is not HOST:PORT, as {example}")
    if bracketed:
        host = host[1:-1]
    if not port.isascii() or not port.isdigit() or int(port) not in _PORTS:
        raise ValueError(f"{what} {text!r}: port {port!r} is not a number from 0 to 65535")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return `HOST:PORT`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_local_target(target: str) -> bool:
    """Return whether gRPC reaches this machine alone by a target.

    That is `HOST:PORT` of this machine, or one socket, `unix:PATH`. A list of addresses, a scheme
    of a resolver and all else is not local.
    """
    if "," in target:
        return False
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    try:
        return is_this_machine(split_address(target)[0])
    except ValueError:
        return False
