"""Make wheels that serve and train where no compiler is: `make wheel`.

A wheel has the Python packages, `_store`, the Triton backend and the dense plugin (backends/), the
server in front of Triton and the node without it (bin/), the presets' dense nets, compiled
(programs/), and what the Debian packages of the libraries that it brings say of their licences
(licences/). torch is not in it: the dense plugin finds that of the environment, whose version the
wheel's extra names.
"""

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from debian.copyright import Copyright, MachineReadableFormatError, NotMachineReadableError

from embertide.server.cli.demo.options import CONTEXT
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.model.build import build_net
from embertide.trainer.model.dlrm import Probability
from embertide.trainer.model.export import export_dense
from embertide.trainer.model.rewrite.package import contexts_of_model
from embertide.trainer.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent
# Every system that the wheel's tag allows has these.
_SYSTEM = {"libc6", "libgcc-s1", "libstdc++6", "zlib1g"}
_TORCH = ("libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libc10.so", "libc10_cuda.so")
_DOCS = Path("/usr/share/doc")


def _run(*command: object) -> str:
    print("==", *command, flush=True)
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{words[0]} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def compile_presets(folder: Path) -> None:
    """Compile the nets of the presets into a cache that `export_dense` looks at."""
    models = [(name, preset()) for name, preset in PRESETS.items()]
    models += [
        (f"{name} in the demo", dataclasses.replace(PRESETS[name](), context=context))
        for name, context in CONTEXT.items()
    ]
    for name, model in models:
        print(f"== compiling the dense net of {name}", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            export_dense(
                Probability(build_net(model)),
                Path(scratch) / "program.pt2",
                dense_features=model.dense_columns,
                embedding_dim=EmbeddingStore(model).embedding_dim,
                contexts=contexts_of_model(model),
                cache=folder,
            )


# --- licences -------------------------------------------------------------------------------------


def _libraries(binary: Path) -> Iterator[Path]:
    for line in _run("ldd", binary).splitlines():
        place = line.partition("=>")[2].split()
        if place and place[0].startswith("/"):
            yield Path(place[0])


def _package(library: Path) -> str | None:
    """Return the Debian package of a library; None: no package has it."""
    for path in (library, library.resolve(), Path("/usr") / str(library).lstrip("/")):
        done = subprocess.run(["dpkg", "-S", path], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.partition(":")[0]
    return None


def copy_licences(binaries: Sequence[Path], folder: Path) -> None:
    """Copy what Debian says of the licence of each library that a wheel will bring."""
    libraries = {library for each in binaries for library in _libraries(each)}
    packages = {_package(library) for library in libraries}
    folder.mkdir(parents=True, exist_ok=True)
    for package in sorted(p for p in packages if p is not None and p not in _SYSTEM):
        shutil.copyfile(_DOCS / package / "copyright", folder / f"{package}.txt")


def _kinds(text: str) -> str:
    """Return the licences that a copyright file names."""
    try:
        parsed = Copyright(text.splitlines(), strict=False)
    except (NotMachineReadableError, MachineReadableFormatError):
        return "see the file"
    files: list[Any] = [each.license for each in parsed.all_files_paragraphs()]
    kinds = dict.fromkeys(each.synopsis for each in files if each and each.synopsis)
    return ", ".join(kinds) or "see the file"


# --- wheels ---------------------------------------------------------------------------------------


def build(python: str, serving: Path, out: Path, work: Path) -> Path:
    """Build the wheel of one Python and have auditwheel put the libraries in."""
    version = _run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    venv = work / f"venv-{version}"
    if not venv.exists():
        _run(python, "-m", "venv", venv)
    tools = venv / "bin"
    # Locked, as protos that a newer grpcio-tools makes need a newer protobuf than Triton's client.
    locked = ("--require-hashes", "-r", "requirements/build.txt")
    _run(tools / "python", "-m", "pip", "install", "-q", *locked)
    raw = work / f"raw-{version}"
    shutil.rmtree(raw, ignore_errors=True)
    define = f"cmake.define.EMBERTIDE_SERVING={serving}"
    built = f"build-dir={work}/{{wheel_tag}}"
    for protos in work.glob(f"cp{version.replace('.', '')}-*/proto/py"):
        shutil.rmtree(protos)  # those of another grpcio-tools look as good as new
    pip = (tools / "python", "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps")
    _run(
        "env", f"PATH={tools}:{os.environ['PATH']}", *pip, "-C", define, "-C", built, "-w", raw, "."
    )
    (wheel,) = raw.glob("*.whl")
    excluded = [word for name in _TORCH for word in ("--exclude", name)]
    repaired = work / f"repaired-{version}"
    shutil.rmtree(repaired, ignore_errors=True)
    _run("auditwheel", "repair", "-w", repaired, *excluded, wheel)
    (whole,) = repaired.glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(whole, out / whole.name))


def contents(wheel: Path) -> str:
    """Return what a wheel brings and how large it is, as a page in Markdown."""
    groups: dict[str, int] = {}
    licences = []
    with zipfile.ZipFile(wheel) as opened:
        for each in (entry for entry in opened.infolist() if not entry.is_dir()):
            parts = Path(each.filename).parts
            group = "/".join(parts[:2] if parts[0] == "embertide" else parts[:1])
            groups[group] = groups.get(group, 0) + each.file_size
            if parts[:2] == ("embertide", "licences"):
                kinds = _kinds(opened.read(each).decode(errors="replace"))
                licences.append(f"| {parts[2].removesuffix('.txt')} | {kinds} |")
    sizes = [f"| `{name}` | {size / 2**20:.1f} |" for name, size in sorted(groups.items())]
    lines = [f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB", ""]
    lines += ["| part | MiB, unpacked |", "|---|---|", *(s for s in sizes if " 0.0 " not in s), ""]
    lines += ["| Debian package | licences of its files |", "|---|---|", *sorted(licences)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make the wheels."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--built", type=Path, default=ROOT / "build" / "cpp")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "wheel")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", action="append", required=True, help="may be given again")
    given = parser.parse_args()
    serving = given.work / "serving"
    for name in ("backends", "bin", "licences"):
        shutil.rmtree(serving / name, ignore_errors=True)
    component = ("--component", "serving", "--strip", "--prefix", serving)
    _run("cmake", "--install", given.built, *component)
    binaries = [*(serving / "backends" / "embertide").iterdir(), *(serving / "bin").iterdir()]
    copy_licences(binaries, serving / "licences")
    compile_presets(serving / "programs")
    for python in given.python:
        wheel = build(python, serving, given.out, given.work)
        (given.out / f"{wheel.name}.md").write_text(contents(wheel))
        print(contents(wheel))


if __name__ == "__main__":
    main()
