"""An authority for tests and benchmarks: signs certificates, laid out as cert-manager does."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _replace(path: Path, content: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    new.rename(path)


class Authority:
    """Signs certificates for localhost and 127.0.0.1."""

    def __init__(self, name: str = "authority") -> None:
        """Make its key and certificate, which are valid for a day."""
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self._certificate = (
            self._builder(self._name, self._key, datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, valid: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=2))
            .not_valid_after(now + valid)
        )

    def issue(
        self,
        folder: Path,
        role: str = "",
        *,
        uri: str = "",
        hosts: tuple[str, ...] = ("localhost", "127.0.0.1"),
        valid: datetime.timedelta = datetime.timedelta(hours=1),
        trusts: tuple["Authority", ...] = (),
    ) -> Path:
        """Write a certificate for `role` ("node/model/news"), or `uri`; return the folder.

        The folder trusts this authority and `trusts`.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = []
        for host in hosts:
            try:
                names.append(x509.IPAddress(ipaddress.ip_address(host)))
            except ValueError:
                names.append(x509.DNSName(host))
        if role or uri:
            names.append(x509.UniformResourceIdentifier(uri or f"spiffe://test/role/{role}"))
        certificate = (
            self._builder(_name("end"), key, valid)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        encoding = serialization.Encoding.PEM
        contents = (
            certificate.public_bytes(encoding),
            key.private_bytes(
                encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in zip(("tls.crt", "tls.key"), contents, strict=True):
            _replace(folder / name, content)
        self.trust(folder, *trusts)
        return folder

    def trust(self, folder: Path, *others: "Authority") -> None:
        """Have a folder trust this authority and others, and no more."""
        trusted = (self, *others)
        encoding = serialization.Encoding.PEM
        _replace(
            folder / "ca.crt",
            b"".join(each._certificate.public_bytes(encoding) for each in trusted),
        )
