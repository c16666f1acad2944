"""TLS both ways by the files of a folder, as cert-manager lays a secret out.

    tls.crt  our certificate, and those that signed it
    tls.key  its key
    ca.crt   whoever we speak with shows a certificate that one of these signed

Files that change hold for connections that are made from then on; nothing is restarted.
"""

import logging
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import grpc

from embertide.server.adapters.process import ProcessError

_LOOK_S = 1.0
_NAMES = ("tls.crt", "tls.key", "ca.crt")
_log = logging.getLogger(__name__)


class TlsError(ProcessError):
    """A folder's files cannot be right; the message names the one that is wrong."""


class TlsFolder:
    """Credentials of gRPC by the files of a folder. Thread-safe.

    Attributes:
        refused: Times that changed files were found wrong, and those before were kept.
    """

    def __init__(self, folder: Path) -> None:
        """Read the files.

        Raises:
            TlsError: They cannot be right.
        """
        self.refused = 0
        self._folder = folder
        self._lock = threading.Lock()
        self._certificate, self._key, self._authorities = self._read()
        self._looked_s = time.monotonic()
        self._changes = 0

    def _read(self) -> tuple[bytes, bytes, bytes]:
        certificate, key, authorities = (self._folder / name for name in _NAMES)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        at = certificate
        try:
            shown = certificate.read_bytes()
            at = key
            secret = key.read_bytes()
            at = authorities
            believed = authorities.read_bytes()
            at = certificate
            context.load_cert_chain(certificate, key)
            at = authorities
            context.load_verify_locations(authorities)
        except ssl.SSLError as error:
            raise TlsError(
                f"TLS: {at} and {key} are no certificate and key in PEM that belong together"
                if at is certificate
                else f"TLS: {at} holds no certificate in PEM; give another file"
            ) from error
        except OSError as error:
            raise TlsError(
                f"TLS: {at}: {error.strerror}; have in the folder {', '.join(_NAMES)}"
            ) from error
        return shown, secret, believed

    def _look(self) -> int:
        """Read the files again, once a second; return how often they have changed."""
        with self._lock:
            if time.monotonic() - self._looked_s >= _LOOK_S:
                self._looked_s = time.monotonic()
                try:
                    now = self._read()
                except TlsError as error:
                    # As while they are replaced one after another.
                    self.refused += 1
                    _log.warning("%s; those before stay", error)
                else:
                    if now != (self._certificate, self._key, self._authorities):
                        self._certificate, self._key, self._authorities = now
                        self._changes += 1
            return self._changes

    @property
    def changes(self) -> int:
        """How often the files have changed: channels made before have the old ones."""
        return self._look()

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(self._key, self._certificate)], root_certificates=self._authorities
        )

    def server(self) -> grpc.ServerCredentials:
        """Return what to listen with: callers must show a certificate."""
        told = self._look()

        def fetch() -> Any:  # None: as before; the stubs do not know that
            nonlocal told
            now = self._look()
            if now == told:
                return None
            told = now
            return self._configuration()

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), fetch, require_client_authentication=True
        )

    def channel(self) -> grpc.ChannelCredentials:
        """Return what to dial with; a channel keeps the files of now."""
        self._look()
        return grpc.ssl_channel_credentials(self._authorities, self._key, self._certificate)


def dial(
    address: str, tls: TlsFolder | None, options: "list[tuple[str, object]] | None" = None
) -> grpc.Channel:
    """Return a channel to an address; without TLS it is plain text.

    No proxy that the environment names is asked: it would read tokens.
    """
    options = [("grpc.enable_http_proxy", 0), *(options or ())]
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.channel(), options=options)
