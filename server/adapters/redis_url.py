"""URLs of Redis whose password lies in a file: redis://USER@HOST:PORT/0?password_file=PATH.

The same stands in trainer/redis_url.py, as neither package imports the other.
"""

from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

import redis
from redis.credentials import CredentialProvider


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


def client_of(url: str, **options: Any) -> redis.Redis:
    """Return a client, which connects when it is first used.

    Raises:
        ValueError: The URL is not one of Redis.
    """
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    path = query.pop("password_file", None)
    if path is not None:
        if parts.password:
            raise ValueError("the Redis URL has a password and a password_file; give one of them")
        options["credential_provider"] = PasswordFile(Path(path[-1]), unquote(parts.username or ""))
        place = parts.netloc.rpartition("@")[2]
        url = parts._replace(netloc=place, query=urlencode(query, doseq=True)).geturl()
    client: redis.Redis = redis.Redis.from_url(url, **options)
    return client
