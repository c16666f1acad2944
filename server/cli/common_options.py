"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from embertide._common import commands
from embertide._common.commands import one_address
from embertide.server.adapters.installation import VARIABLE
from embertide.server.adapters.process import UsageError
from embertide.server.adapters.triton import find_backends, find_programs

Backends = Annotated[
    Path,
    typer.Option(
        envvar="EMBERTIDE_BACKENDS",
        help="The folder that holds embertide/libtriton_embertide.so.",
        show_default="the installed package's, or build/cpp/backends of the checkout",
    ),
]
Triton = Annotated[
    Path | None,
    typer.Option(
        "--triton",
        envvar=VARIABLE,
        help="The tritonserver to start, or the folder that it is installed in, as "
        "/opt/tritonserver of NVIDIA's container.",
        show_default="that of the wheel nvidia-pytriton",
    ),
]
DEFAULT_BACKENDS = find_backends()
DEFAULT_CACHE = find_programs()
HealthListen = Annotated[
    str | None,
    typer.Option(
        callback=one_address,
        help="HOST:PORT of the health service alone, in plain text: for Kubernetes' probes, which "
        "have no certificate.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def read_secret(option: str, path: Path) -> str:
    """Return the token or key that a file holds, alone; `option` named the file.

    Raises:
        ProcessError: It cannot be read.
    """
    return commands.read_secret(option, path, UsageError)
