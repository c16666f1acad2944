"""The server of the console: uvicorn, in a thread, with TLS by the files of a folder.

    tls.crt  the certificate that browsers see, and those that signed it
    tls.key  its key

Files that change hold for connections that are made from then on.
"""

import logging
import socket
import ssl
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import uvicorn
from starlette.types import ASGIApp

from embertide._common.addresses import is_this_machine, join_address, split_address
from embertide._common.background import BackgroundTask
from embertide._common.reporting import system_error
from embertide.server.adapters.tls import TlsError
from embertide.server.services.listening import ListenError

_log = logging.getLogger(__name__)
CONNECTIONS_MAX = 256
_HEADERS_BYTES_MAX = 16 << 10
_IDLE_S = 5
_LOOK_S = 2.0
_STOP_S = 5
_NAMES = ("tls.crt", "tls.key")


class HttpsFolder:
    """The certificate that browsers see. It is read again when its files change.

    Attributes:
        context: The TLS context that a server listens with.
        refused: Times that changed files were found wrong, and those before were kept.
    """

    def __init__(self, folder: Path) -> None:
        """Read the files.

        Raises:
            TlsError: They cannot be right.
        """
        self.refused = 0
        self._paths = tuple(folder / name for name in _NAMES)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._seen = self._bytes()
        self._load(self.context)

    def look(self) -> None:
        """Read the files again, if they have changed; wrong ones are not taken."""
        try:
            now = self._bytes()
            if now == self._seen:
                return
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
        except TlsError as error:
            self.refused += 1
            _log.warning("%s; those before stay", error)
        else:
            self._seen = now

    def _bytes(self) -> tuple[bytes, ...]:
        try:
            return tuple(path.read_bytes() for path in self._paths)
        except OSError as error:
            raise TlsError(f"--https {system_error(error)}; have in it tls.crt, tls.key") from error

    def _load(self, context: ssl.SSLContext) -> None:
        certificate, key = self._paths
        try:
            context.load_cert_chain(certificate, key)
        except (ssl.SSLError, OSError) as error:
            raise TlsError(
                f"--https: {certificate} and {key} are no certificate and key in PEM that belong "
                "together"
            ) from error


def check_listen(address: str, https: Path | None, *, plaintext: bool) -> None:
    """Prove that a console may listen at an address.

    Raises:
        ListenError: That would be where others can listen in, and nobody said that it may.
    """
    if https is None and not is_this_machine(split_address(address)[0]):
        if not plaintext:
            raise ListenError(
                f"{address} would be plain HTTP that others can reach: give --https with a folder "
                "of tls.crt and tls.key, or --plaintext on a network that nobody else listens to"
            )
        _log.warning("PLAINTEXT at %s: who listens on the network reads tokens", address)


class ConsoleServer:
    """Serves an application. A context manager.

    Attributes:
        address: Where it listens, HOST:PORT.
    """

    def __init__(self, app: ASGIApp, listen: str, https: HttpsFolder | None = None) -> None:
        """Listen; port 0 takes a free one.

        Raises:
            ListenError: The address cannot be listened on.
        """
        host, port = split_address(listen)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ListenError(
                f"cannot listen on {listen} ({error.strerror}): stop what listens there, or choose "
                "another address"
            ) from error
        self.address = join_address(host, self._socket.getsockname()[1])
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            http="h11",
            limit_concurrency=CONNECTIONS_MAX,
            h11_max_incomplete_event_size=_HEADERS_BYTES_MAX,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=_STOP_S,
        )
        config.load()
        if https is not None:
            config.ssl = https.context
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="console", daemon=True
        )
        self._https = https
        self._look = BackgroundTask("https", self._look_again)

    def _look_again(self, _stop: threading.Event) -> float:
        if self._https is not None:
            self._https.look()
        return _LOOK_S

    def wait(self) -> None:
        """Wait until it has ended."""
        self._thread.join()

    def __enter__(self) -> Self:
        """Serve from now on."""
        self._thread.start()
        self._look.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Answer no more."""
        self._look.stop()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
