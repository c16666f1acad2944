"""URLs of Redis whose password lies in a file: redis://USER@HOST:PORT/0?password_file=PATH."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

import redis
from redis.credentials import CredentialProvider

_PLACE = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")


class PasswordFile(CredentialProvider):
    """Reads the password anew for every connection, so that a new one needs no restart."""

    def __init__(self, path: Path, user: str) -> None:
        """Name the file, and the user; empty: Redis' default one."""
        self._path = path
        self._user = user

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return what AUTH is given.

        Raises:
            redis.ConnectionError: The file cannot be read.
        """
        try:
            password = self._path.read_text().strip()
        except OSError as error:
            raise redis.ConnectionError(f"password_file {self._path}: {error.strerror}") from error
        if not password:  # as while it is replaced
            raise redis.ConnectionError(f"password_file {self._path} is empty")
        return (self._user, password) if self._user else (password,)


def place_of(url: str) -> str:
    """Return where a URL leads, without user, password and options: for messages."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    place = parts.netloc.rpartition("@")[2]
    # Text that is not HOST:PORT may be a part of a password.
    return place if _PLACE.fullmatch(place) else "..."


def check_url(url: str) -> None:
    """Return if a URL can be one of Redis.

    Raises:
        ValueError: It cannot be; the message has no password.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        named = "..." + place_of(url) if "@" in url else url[:80]  # it may hold a password
        raise ValueError(f"{named!r} is no Redis URL; use redis://HOST:PORT/0")
    if parts.scheme == "unix":
        return
    if "@" in parts.path + parts.fragment or "@" in (parts.password or ""):
        raise ValueError(
            "the password in the Redis URL holds a character of URLs; write %40 for @, %2F for /, "
            "%23 for #, %3A for :, %3F for ?, or give ?password_file=PATH"
        )
    try:
        port = parts.port
    except ValueError:
        port = -1
    if not parts.hostname or port == -1:
        raise ValueError(
            f"Redis URL at {place_of(url)!r}: write HOST:PORT with a port of 1 to 65535"
        )


def cause_of(option: str, error: redis.RedisError) -> str:
    """Return what is wrong with a Redis and what to do, to stand behind its name."""
    cause = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, redis.AuthenticationError) or cause.startswith(("NOAUTH", "WRONGPASS")):
        return (
            f"refuses the user or the password of {option} ({cause}): check both, or the file that "
            "?password_file= names"
        )
    if isinstance(error, redis.exceptions.NoPermissionError):
        return f"does not let this user do that ({cause}): give it the rules of docs/security.md"
    if isinstance(error, redis.TimeoutError):
        return (
            f"cannot be reached in time ({cause}): see whether it is busy or behind a firewall, or "
            f"give another {option}"
        )
    if isinstance(error, redis.ConnectionError):
        return f"cannot be reached: {cause}; start it, or give another {option}"
    return f"refuses: {cause}; repair it, or give another {option}"


def failure(option: str, url: str, error: Exception) -> str:
    """Return what to tell of a Redis that cannot be used: where it is, the cause, the remedy."""
    if isinstance(error, redis.RedisError):
        return f"Redis at {place_of(url)} {cause_of(option, error)}"
    return f"{option}: {error}"


def client_of(url: str, **options: Any) -> redis.Redis:
    """Return a client, which connects when it is first used.

    Raises:
        ValueError: The URL is not one of Redis.
    """
    check_url(url)
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    path = query.pop("password_file", None)
    if path is not None:
        if parts.password:
            raise ValueError("the Redis URL has a password and a password_file; give one of them")
        options["credential_provider"] = PasswordFile(Path(path[-1]), unquote(parts.username or ""))
        place = parts.netloc.rpartition("@")[2]
        rest = urlencode(query, doseq=True)
        # Not by geturl: it leaves out the slashes of an address without a host, a socket's.
        url = f"{parts.scheme}://{place}{parts.path}{'?' * bool(rest)}{rest}"
    client: redis.Redis = redis.Redis.from_url(url, **options)
    return client
