"""Which tritonserver is started: one that somebody names, or that of the wheel.

An installation lies as in NVIDIA's container, in `/opt/tritonserver`: `bin/tritonserver`,
`lib/libtritonserver.so`, `backends` and `caches`. The wheel ``nvidia-pytriton`` has its libraries
elsewhere; it is found, never imported.
"""

import dataclasses
import functools
import importlib.metadata
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from embertide._common.quoting import terminal_text
from embertide.server.adapters.process import Child, ProcessError, how_ended

VARIABLE = "EMBERTIDE_TRITON"
"""Names an installation where no option does."""
_WHEEL = "nvidia-pytriton"
_INSTALL = f"pip install {_WHEEL}==0.7.0"
_GIVE = (
    "give a tritonserver, or the folder that it is installed in, as /opt/tritonserver, by --triton "
    f"or {VARIABLE}"
)
_HELP_S, _START_S, _POLL_S = 60.0, 60.0, 0.02
_OPTION = re.compile(r"^\s*(--[a-z0-9-]+)", re.MULTILINE)
_VERSION = re.compile(r"\|\s*server_version\s*\|\s*(\S+)\s*\|")
# The loader's message about a library that is missing or belongs to another system.
_NOT_LOADED = re.compile(r"error while loading shared libraries: .*|version `.*' not found.*")


class InstallationError(ProcessError):
    """There is no tritonserver that can be started; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Installation:
    """A tritonserver and what belongs to it.

    Attributes:
        binary: The program.
        root: Holds `backends` and `caches`.
        library: libtritonserver.so, which has the server itself behind a C API.
        libraries: Folders of what `binary` and `library` load.
    """

    binary: Path
    root: Path
    library: Path
    libraries: tuple[Path, ...]

    def environment(self) -> dict[str, str]:
        """Return what a process needs to load `library`, beside our own environment."""
        paths = [*map(str, self.libraries), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            "LD_LIBRARY_PATH": ":".join(path for path in paths if path),
            "AIP_MODE": "",  # else Triton may open an HTTP of Vertex AI
        }

    def options(self) -> frozenset[str]:
        """Return the options that the program knows, as `--help` lists them.

        Raises:
            InstallationError: It cannot be started, or is no tritonserver.
        """
        return _options(self)

    def check_options(self, arguments: Iterable[str]) -> None:
        """Prove that the program can be started, and knows the options of these arguments.

        Raises:
            InstallationError: It cannot, or does not.
        """
        named = {each.partition("=")[0] for each in arguments if each.startswith("--")}
        if unknown := sorted(named - self.options()):
            raise InstallationError(
                f"{self.binary} has no {', '.join(unknown)}: it is too old, or was built without; "
                "give a newer one by --triton (docs/install.md)"
            )

    def version(self) -> str:
        """Return the version, as a server without models and ports says it when it starts.

        Raises:
            InstallationError: It does not start, or does not say it.
        """
        known = self.options()
        closed = (f"--allow-{each}" for each in ("http", "grpc", "metrics"))
        with tempfile.TemporaryDirectory(prefix="embertide-") as name:
            folder = Path(name)
            command = [
                str(self.binary),
                *(f"--{each}-directory={folder}" for each in ("backend", "cache", "repoagent")),
                f"--model-repository={folder}",
                "--model-control-mode=explicit",
                "--exit-timeout-secs=0",
                *(f"{each}=false" for each in closed if each in known),
            ]
            log = folder / "log"
            with Child(command, log=log, environment=self.environment()) as child:
                end_s = time.monotonic() + _START_S
                while True:
                    alive = child.alive()
                    said = child.log_text()
                    if match := _VERSION.search(said):
                        child.kill()
                        return match[1]
                    if not alive or time.monotonic() > end_s:
                        ended = how_ended(child.code or 0) if not alive else "no version"
                        raise InstallationError(
                            f"{self.binary} does not start without models ({ended}): "
                            f"{_last_line(said)}; {_GIVE}"
                        )
                    time.sleep(_POLL_S)


def find_installation(named: Path | None = None) -> Installation:
    """Return the installation that is named, here or by EMBERTIDE_TRITON, or that of the wheel.

    Nothing is started: `Installation.check_options` proves that it can be.

    Raises:
        InstallationError: It is not there.
    """
    path = named or os.environ.get(VARIABLE)
    if not path:
        return _of_wheel()
    try:
        return _of_path(Path(path))
    except OSError as error:
        raise InstallationError(f"{path}: {error.strerror}; {_GIVE}") from error


def _of_path(path: Path) -> Installation:
    binary = path / "bin" / "tritonserver" if path.is_dir() else path
    if not binary.is_file():
        raise InstallationError(f"{binary} is not there: {_GIVE}")
    if not os.access(binary, os.X_OK):
        raise InstallationError(
            f"{binary} cannot be executed by this user: chmod +x it, or {_GIVE}"
        )
    binary = binary.resolve()
    root = binary.parent.parent if binary.parent.name == "bin" else binary.parent
    found = _library_below(root)
    if found is None:
        raise InstallationError(
            f"{binary} is no installed tritonserver, as {root}/lib/libtritonserver.so is not "
            f"there: {_GIVE}"
        )
    return Installation(binary=binary, root=root, library=found, libraries=(found.parent,))


def _library_below(root: Path) -> Path | None:
    for folder in ("lib", "lib64", "."):
        if (root / folder / "libtritonserver.so").is_file():
            return root / folder / "libtritonserver.so"
    # The wheel's tree, by its path.
    return next((root.parent.parent / "nvidia_pytriton.libs").glob("libtritonserver*.so"), None)


def _of_wheel() -> Installation:
    try:
        distribution = importlib.metadata.distribution(_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise InstallationError(
            f"tritonserver is missing: {_INSTALL} (wheels exist for Linux x86-64, Python 3.9 to "
            "3.13), or give one by --triton"
        ) from None
    root = Path(str(distribution.locate_file(""))) / "pytriton" / "tritonserver"
    binary, library = root / "bin" / "tritonserver", _library_below(root)
    if not binary.is_file() or library is None:
        raise InstallationError(f"{root} is not whole: {_INSTALL} --force-reinstall")
    return Installation(binary=binary, root=root, library=library, libraries=(library.parent,))


@functools.lru_cache(maxsize=16)
def _options(installation: Installation) -> frozenset[str]:
    binary = installation.binary
    try:
        done = subprocess.run(
            [binary, "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_HELP_S,
            check=False,
            env={**os.environ, **installation.environment()},
        )
    except subprocess.TimeoutExpired:
        raise InstallationError(
            f"{binary} did not end within {_HELP_S:.0f} s when asked for its options, so it is no "
            f"tritonserver: {_GIVE}"
        ) from None
    except OSError as error:
        raise InstallationError(
            f"{binary} cannot be started ({error.strerror}): {_GIVE}"
        ) from error
    said = done.stderr + done.stdout
    if missing := _NOT_LOADED.search(said):
        raise InstallationError(
            f"{binary} cannot be loaded ({terminal_text(missing[0][:300])}): install what it "
            "lacks, put its folder on LD_LIBRARY_PATH, or run it on the system that it was built "
            "for"
        )
    if "Usage: tritonserver" not in said:
        raise InstallationError(
            f"{binary} is no tritonserver ({how_ended(done.returncode)}: {_last_line(said)}): "
            f"{_GIVE}"
        )
    return frozenset(_OPTION.findall(said))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return terminal_text(lines[-1][:200]) if lines else "it said nothing"
