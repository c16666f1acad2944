"""Files as bytes: local paths and URLs, decompressed by what they begin with.

A file's first bytes tell more than its name: exports are called .csv and are gzip, or Parquet.
"""

import contextlib
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from embertide._common.quoting import terminal_text
from embertide.trainer.data.urls import file_systems
from embertide.trainer.errors import DataError

_ARROW_CODECS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bz2",
    b"\x04\x22\x4d\x18": "lz4",
}
_XZ = b"\xfd7zXZ\x00"
_PARQUET = b"PAR1"
FAILURES = (OSError, EOFError, lzma.LZMAError, pa.ArrowException)
"""Errors of reading a file that was opened."""
# Formats that are neither Parquet nor text in columns, and the remedy for each.
_OTHERS = {
    b"PK\x03\x04": "is a zip archive (or a spreadsheet): unpack it, or save it as CSV",
    b"ARROW1": "is an Arrow file: write it as Parquet",
    b"ORC": "is an ORC file: write it as Parquet",
    b"Obj\x01": "is an Avro file: write it as Parquet",
    b"SQLite format 3": "is a database: export a table as CSV",
    b"\xd0\xcf\x11\xe0": "is a spreadsheet: save it as CSV",
    b"%PDF": "is a PDF: give a table of events",
    b"\x89HDF": "is an HDF5 file: write it as Parquet",
    b"PAR1": "is Parquet and no text: leave its format out, and unpack it if it is compressed",
}
_MAGIC_BYTES = 16


@contextmanager
def open_bytes(path: str, *, inflate: bool = False) -> Iterator[Any]:
    """Opens a local path, or any URL that fsspec knows, for reading.

    Args:
        path: The file.
        inflate: Decompress what is gzip, zstd, bzip2, lz4 or xz, whatever the file is called.

    Raises:
        DataError: There is no such file, or it cannot be read.
    """
    with contextlib.ExitStack() as stack:
        try:
            opened = _opened(path)
            stack.callback(opened.close)
            if inflate:
                opened = _inflated(opened, stack)
        except FileNotFoundError as error:
            cause = error.__cause__
            why = "" if cause is None else terminal_text(f" ({type(cause).__name__}: {cause})")
            raise DataError(path, f"there is no such file{why}; check the path") from error
        except UnicodeError as error:
            raise DataError(path, "its name is not UTF-8; rename it") from error
        except (OSError, ValueError, ImportError) as error:
            said = terminal_text(str(error))
            raise DataError(path, f"cannot be opened: {said}; check the path") from error
        yield opened


def _opened(path: str) -> Any:
    if "://" in path:
        system, name = file_systems().url_to_fs(path)
        system.info(name)  # unlike `exists`, it tells a server that is away from a missing file
        return system.open(name, "rb")
    if "\0" in path or not Path(path).is_file():
        raise FileNotFoundError(path)
    return pa.OSFile(path)


def _inflated(opened: Any, stack: contextlib.ExitStack) -> Any:
    magic = bytes(opened.read(_MAGIC_BYTES))
    opened.seek(0)
    if magic.startswith(_XZ):
        return stack.enter_context(lzma.open(opened))
    for begins, codec in _ARROW_CODECS.items():
        if magic.startswith(begins):
            source = opened if isinstance(opened, pa.NativeFile) else pa.PythonFile(opened, "r")
            return stack.enter_context(pa.CompressedInputStream(source, codec))
    return opened


def is_parquet(path: str) -> bool:
    """Whether a file begins as Parquet does.

    Raises:
        DataError: There is no such file, or it cannot be read.
    """
    with open_bytes(path) as file:
        return bytes(file.read(len(_PARQUET))) == _PARQUET


def other_format(head: bytes) -> str | None:
    """Return the remedy for bytes that are no text in columns; None: they may be."""
    for begins, remedy in _OTHERS.items():
        if head.startswith(begins):
            return remedy
    if head.lstrip()[:1] in (b"{", b"<") or head.lstrip()[:2] in (b"[{", b"[["):
        what = "JSON" if head.lstrip()[:1] != b"<" else "HTML or XML"
        return f"is {what} and no text in columns: write it as Parquet or CSV"
    return None
