"""The folder that export-dense writes and an import reads: a dense net ready for a snapshot.

    program.pt2            the AOTInductor package
    tensors.safetensors    its parameters and buffers
    dense.json             what the two are, and how they were made

It needs no torch, so that importing a model needs none.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embertide import _store
from embertide.trainer.publish.importer.sources import ModelImportError
from embertide.trainer.publish.snapshot import DensePart

FORMAT = 1
PROGRAM = "program.pt2"
TENSORS = "tensors.safetensors"
DESCRIPTION = "dense.json"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DenseFolder:
    """A dense net: the part for a snapshot, the widths of its two inputs, the names of its scores.

    Attributes:
        heads: Empty: it gives one score, without a name.
    """

    part: DensePart
    dense_features: int
    embedding_dim: int
    heads: tuple[str, ...] = ()


def write_description(
    folder: Path,
    *,
    cpu: str,
    dense_features: int,
    embedding_dim: int,
    heads: Sequence[str] = (),
    **more: object,
) -> dict[str, Any]:
    """Write dense.json beside a program and its tensors, and return what it says.

    Args:
        folder: Where program and tensors are.
        cpu: The CPU baseline that the program was compiled for.
        dense_features: Columns of dense_BD.
        embedding_dim: Columns of embeddings_BE.
        heads: Names of its scores, where there are several.
        more: Facts that no reader needs: torch's version and the like.
    """
    program = folder / PROGRAM
    part = DensePart(program=program, cpu=cpu, tensors=(folder / TENSORS).read_bytes())
    description: dict[str, Any] = {
        "format": FORMAT,
        "cpu": cpu,
        "dense_features": dense_features,
        "embedding_dim": embedding_dim,
        **({"heads": list(heads)} if heads else {}),
        "dense_id": part.id,
        "program_crc32c": _store.crc32c(program.read_bytes()),
        **more,
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    return description


def read_dense_folder(folder: Path) -> DenseFolder:
    """Read what export-dense wrote.

    Raises:
        ModelImportError: A file is missing, or is not the one that dense.json means.
    """
    for name in (DESCRIPTION, PROGRAM, TENSORS):
        if not (folder / name).is_file():
            raise ModelImportError(folder, f"{name} is missing; make the folder with export-dense")
    try:
        said = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        if said["format"] != FORMAT:
            raise ModelImportError(
                folder, f"format {said['format']}, this build reads {FORMAT}: export it again"
            )
        part = DensePart(
            program=folder / PROGRAM, cpu=said["cpu"], tensors=(folder / TENSORS).read_bytes()
        )
        crc32c = _store.crc32c((folder / PROGRAM).read_bytes())
        for name, is_, want in (
            (TENSORS, part.id, said["dense_id"]),
            (PROGRAM, crc32c, said["program_crc32c"]),
        ):
            if is_ != want:
                raise ModelImportError(
                    folder / name, f"is not the file that {DESCRIPTION} means: export it again"
                )
        return DenseFolder(
            part=part,
            dense_features=int(said["dense_features"]),
            embedding_dim=int(said["embedding_dim"]),
            heads=tuple(said.get("heads", ())),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ModelImportError(
            folder / DESCRIPTION, f"is not as export-dense writes it ({error!r}): export it again"
        ) from error
