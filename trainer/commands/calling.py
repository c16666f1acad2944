"""How a command calls nodes that ask who calls: by TLS, with a token (docs/security.md).

The environment is not asked: EMBERTIDE_TLS and EMBERTIDE_TOKEN_FILE are for a control plane, as a
context has them, and its token goes nowhere else.
"""

from pathlib import Path
from typing import Annotated

import typer

from embertide._common.commands import read_secret
from embertide.client.settings import Settings, Tls
from embertide.trainer.errors import ConfigurationError

TlsFolder = Annotated[
    Path | None,
    typer.Option(
        "--tls",
        help="Folder of ca.crt, and of your tls.crt and tls.key if the nodes ask for them: nodes "
        "are spoken to by TLS.",
    ),
]

TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="File that holds your token, alone; a reader's will do. Read again for each request.",
    ),
]


def settings_of(tls: Path | None, token_file: Path | None) -> Settings:
    """Return how to call nodes.

    Args:
        tls: Folder of ca.crt, and of tls.crt and tls.key or neither; None: plain text.
        token_file: Holds a token; None: none is sent.

    Raises:
        ConfigurationError: The token cannot be read.
    """
    own = tls is not None and (tls / "tls.crt").exists()
    return Settings(
        tls=None
        if tls is None
        else Tls(
            ca=tls / "ca.crt",
            certificate=tls / "tls.crt" if own else None,
            key=tls / "tls.key" if own else None,
        ),
        token=None
        if token_file is None
        else lambda: read_secret("--token-file", token_file, ConfigurationError),
    )
