"""Object storage: where a publication has a copy, under a URL as s3://BUCKET/PREFIX.

Objects have the names of the publication's files (docs/formats.md). An object appears whole or not
at all, and reads see it at once; nothing is renamed. obstore speaks to S3 and what is compatible
with it, to gs://, az:// and file://, and tries again what failed on the way, with growing pauses.

Credentials come from the environment as each service has them (AWS_ACCESS_KEY_ID, web identity,
the machine's role), or from the folder that EMBERTIDE_STORAGE_OPTIONS names: a file an option, as a
Secret is mounted. They are read again after an error, so that they can be replaced.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from embertide import _store
from embertide._common.quoting import without_secrets
from embertide.trainer.errors import ConfigurationError, TrainerError
from embertide.trainer.publish.folder import VersionId
from embertide.trainer.publish.threads import Workers

OPTIONS = "EMBERTIDE_STORAGE_OPTIONS"
_AT_ONCE = 4  # objects on their way, each with at most `_PARTS` parts in memory
_PART_BYTES = 8 << 20
_PARTS = 2
_MAX_BYTES = 64 << 20  # of an object that is read whole, as a commit
_MAX_WORDS = 400  # of what a library says
_CLIENT = {"timeout": timedelta(seconds=60), "connect_timeout": timedelta(seconds=5)}
_RETRIES = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5)},
}


class StorageError(TrainerError):
    """Storage did not do what it was asked for; the message names the object and the reason."""


class DamagedError(StorageError):
    """An object is not what its commit, manifest or checkpoint says."""

    remedy = "bring it back from a copy; the newest version that is whole is taken"


def is_url(place: str) -> bool:
    """Return whether a place is in object storage, and no folder."""
    return "://" in place


def _options() -> dict[str, str]:
    """Return what the folder of options says.

    Raises:
        ConfigurationError: It cannot be read.
    """
    folder = os.environ.get(OPTIONS)
    if not folder:
        return {}
    try:
        # A mounted Secret has hidden folders beside its files.
        files = [each for each in Path(folder).iterdir() if not each.name.startswith(".")]
        return {each.name: each.read_text().strip() for each in files if each.is_file()}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{OPTIONS} {folder} cannot be read ({error}): name a folder of files, one an option"
        ) from error


def _words(error: Exception) -> str:
    """Return what the library says of an error, less its report of the cause, which is for Rust."""
    return without_secrets(str(error).partition("\n")[0])[:_MAX_WORDS]


class Storage:
    """A publication's objects. May be used by several threads.

    Memory: four objects at once, each with 16 MiB at most.

    Attributes:
        url: The given URL, without what may be a secret in it.
    """

    def __init__(self, url: str) -> None:
        """Name the place; nothing is asked of it yet.

        Raises:
            ConfigurationError: The URL, or an option, is none that the library knows.
        """
        self._place = url.rstrip("/")
        self.url = without_secrets(self._place)
        self._store: Any = self._open()
        self._workers = Workers("storage", _AT_ONCE)

    def _open(self) -> Any:
        client = {**_CLIENT, "allow_http": self._plain()}
        options: dict[str, Any] = _options()
        if self._place.startswith("file://"):
            return from_url(self._place, mkdir=True, automatic_cleanup=True)
        try:
            open_url: Any = from_url  # of each service's own types
            return open_url(
                self._place, config=options or None, client_options=client, retry_config=_RETRIES
            )
        except (BaseError, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"{self.url} cannot be opened ({_words(error)}): give "
                "s3://BUCKET/PREFIX, and check the variables of its credentials"
            ) from error

    @staticmethod
    def _plain() -> bool:
        """Whether the endpoint that is configured is one without TLS."""
        options = _options()
        names = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
        given = [options.get(each.lower()) or os.environ.get(each, "") for each in names]
        return any(each.startswith("http://") for each in given)

    @contextlib.contextmanager
    def _asking(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (BaseError, OSError) as error:
            # Credentials may have been replaced.
            with contextlib.suppress(ConfigurationError):
                self._store = self._open()
            raise StorageError(f"{self.url}/{key}: {_words(error)}") from error

    # --- one object -------------------------------------------------------------------------------

    def put(self, key: str, path: Path) -> int:
        """Write a file as an object; return its bytes.

        Raises:
            StorageError: It could not be written.
            FileNotFoundError: The file is gone.
        """
        size = path.stat().st_size
        with self._asking(key):
            obstore.put(self._store, key, path, chunk_size=_PART_BYTES, max_concurrency=_PARTS)
        return size

    def put_bytes(self, key: str, data: bytes) -> None:
        """Write an object.

        Raises:
            StorageError: It could not be written.
        """
        with self._asking(key):
            obstore.put(self._store, key, data)

    def claim(self, key: str, data: bytes) -> bool:
        """Write an object that nobody has written before; return whether it was so.

        Raises:
            StorageError: It could not be written.
        """
        with self._asking(key):
            try:
                obstore.put(self._store, key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                # A request that was tried again may have met itself.
                return self.read(key) == data
        return True

    def read(self, key: str) -> bytes | None:
        """Return an object's bytes; None: there is none.

        Raises:
            StorageError: It cannot be read, or is larger than 64 MiB.
        """
        with self._asking(key):
            try:
                found = obstore.get(self._store, key)
            except FileNotFoundError:
                return None
            if found.meta["size"] > _MAX_BYTES:
                raise StorageError(
                    f"{self.url}/{key} has {found.meta['size']:,} bytes; give another prefix"
                )
            return bytes(found.bytes())

    def exists(self, key: str) -> bool:
        """Return whether an object is there.

        Raises:
            StorageError: It cannot be told.
        """
        with self._asking(key):
            try:
                obstore.head(self._store, key)
            except FileNotFoundError:
                return False
        return True

    def fetch(self, key: str, path: Path, *, size: int, crc32c: int | None) -> None:
        """Write an object to a file, proved; its bytes are on the drive when this returns.

        Raises:
            DamagedError: It is missing, or not of this size and checksum (None: not known).
            StorageError: It cannot be read.
        """
        found, crc = 0, 0
        with self._asking(key):
            try:
                chunks = obstore.get(self._store, key).stream(min_chunk_size=1 << 20)
            except FileNotFoundError:
                raise DamagedError(f"{self.url}/{key} is missing") from None
            with path.open("wb") as file:
                for chunk in chunks:
                    data = bytes(chunk)
                    found, crc = found + len(data), _store.crc32c(data, crc)
                    file.write(data)
                    if found > size:
                        break
                file.flush()
                os.fsync(file.fileno())
        if found != size or (crc32c is not None and crc != crc32c):
            raise DamagedError(
                f"{self.url}/{key} has {found} bytes and crc32c {crc:08x}, what names it says "
                f"{size}" + ("" if crc32c is None else f" and {crc32c:08x}")
            )

    # --- many objects -----------------------------------------------------------------------------

    def side_by_side(self, jobs: Iterable[Any]) -> None:
        """Do jobs without arguments, four at a time; what the first one raises is raised.

        When this returns or raises, none is under way.
        """
        doing = [self._workers.submit(job) for job in jobs]
        failures = [each.exception() for each in doing]
        for failure in failures:
            if failure is not None:
                raise failure

    def names(self, parent: str) -> list[VersionId]:
        """Return the versions that have any object in PARENT/NUMBER-LINEAGE/, ascending.

        Raises:
            StorageError: It cannot be told.
        """
        with self._asking(parent):
            found = obstore.list_with_delimiter(self._store, parent)["common_prefixes"]
        versions = (VersionId.read(each.rpartition("/")[2]) for each in found)
        return sorted(version for version in versions if version)

    def keys(self, prefix: str) -> list[str]:
        """Return the names of all objects in a folder.

        Raises:
            StorageError: It cannot be told.
        """
        with self._asking(prefix):
            return [each["path"] for part in obstore.list(self._store, prefix) for each in part]

    def remove(self, keys: list[str]) -> None:
        """Remove objects; one that is not there is no error.

        Raises:
            StorageError: One is there still, perhaps.
        """
        if not keys:
            return
        with self._asking(keys[0]):
            try:
                obstore.delete(self._store, keys)
            except FileNotFoundError:  # of a folder of this machine, which goes no further then
                for key in keys:
                    with contextlib.suppress(FileNotFoundError):
                        obstore.delete(self._store, key)
