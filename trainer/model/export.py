"""Exporting a dense net as an AOTInductor package whose parameters are graph inputs.

One package serves every version: nothing is swapped, folded or locked; a run is handed the weights
of the version that it is pinned to (DESIGN.md section 6). The package describes itself in its
metadata under "embertide" (backend_cpp/dense/plugin.cc reads it). Of a net with large layers it has
more programs: for one sample (one_sample.py) and for many (products.py), by choice in bf16 or int8
(reduced.py); of a model with contexts, for requests of users and candidates (rewrite/package.py).
"""

import atexit
import contextlib
import copy
import hashlib
import io
import itertools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from embertide import trainer
from embertide._common import private
from embertide._common.room import free_bytes, is_no_room, no_room
from embertide.trainer.config import ReducedType
from embertide.trainer.errors import FinalError
from embertide.trainer.model import gathers, one_sample, products, reduced
from embertide.trainer.model.one_thread import one_thread
from embertide.trainer.model.quiet import quiet_torch
from embertide.trainer.model.rewrite.package import (
    COSTS,
    ONE_USER,
    REWRITING,
    column_ranges,
    context_programs,
)
from embertide.trainer.model.rewrite.reading import Contexts

FORMAT, FORMAT_OF_HEADS = 1, 2
_COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"
# Environment variables that change the program made from a net.
_COMPILER_OPTIONS = (
    "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL",
    "AOT_INDUCTOR_ENABLE_LINE_TABLES",
)
_ANY_BATCH = "model"  # what torch calls the program of a package that has one
# A wheel has the presets' programs (.ci/wheel.py): the demo runs where no compiler is.
_SHIPPED = Path(trainer.__file__).resolve().parent.parent / "programs"
# The vector width of each baseline, which is also the `-march`.
_VECTOR_BITS = {"x86-64-v2": 128, "x86-64-v3": 256, "x86-64-v4": 512}
log = logging.getLogger(__name__)

Programs = dict[str, torch.export.ExportedProgram]


class ExportError(FinalError):
    """The module cannot be exported; the message says why and what to do."""

    remedy = "docs/training.md has more of what a net must be"


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return what a version brings: parameters and persistent buffers, by name, in order.

    Buffers of integers are part of the program: BatchNorm's counters, which no score depends on,
    and tables of indices. The others are the module's own where it is on the CPU, and else copies
    that are.
    """
    parameters = dict(module.named_parameters())
    state = module.state_dict()
    varying = {n: t for n, t in state.items() if t.is_floating_point() or t.is_complex()}
    return {name: parameters.get(name, varying[name]).detach().cpu() for name in sorted(varying)}


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Have a module score as it is served, without dropout, in `with`."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


def on_cpu(module: nn.Module) -> nn.Module:
    """Return the module, or a copy of it that is on the CPU, where nodes run it."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    if all(each.device.type == "cpu" for each in tensors):
        return module
    return copy.deepcopy(module).cpu()


class _Functional(nn.Module):
    """`module` with its tensors as arguments; of several heads, a score_B for each."""

    def __init__(self, module: nn.Module, names: list[str], heads: int) -> None:
        super().__init__()
        self._heads = heads
        # In a list, torch.export does not see it as a child, and so bakes in no parameter.
        self._module = [module]
        self._names = names

    def forward(
        self, dense: Tensor, embeddings: Tensor, *tensors: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        state = dict(zip(self._names, tensors, strict=True))
        scores: Tensor = torch.func.functional_call(self._module[0], state, (dense, embeddings))
        if self._heads == 1:
            return scores.reshape(-1).contiguous()
        return tuple(score_B.contiguous() for score_B in scores.unbind(1))


def _description(
    tensors: dict[str, Tensor],
    dense_features: int,
    embedding_dim: int,
    heads: int,
    programs: Programs,
) -> dict[str, Any]:
    first = products.first_batch(programs[_ANY_BATCH])
    packed = products.packable(programs[_ANY_BATCH]) if first else ()
    parameters = [{"name": name, "shape": list(tensor.shape)} for name, tensor in tensors.items()]
    return {
        # Nodes of before there were several read all others.
        "format": FORMAT if heads == 1 else FORMAT_OF_HEADS,
        "dense_features": dense_features,
        "embedding_dim": embedding_dim,
        **({} if heads == 1 else {"heads": heads}),
        # Nodes of before there was one run the other.
        **({one_sample.NAME: True} if one_sample.NAME in programs else {}),
        **({products.NAME: first} if first else {}),
        # Behind dense_BD and embeddings_BE come the parameters.
        **({"packed": [place - 2 for place in packed]} if packed else {}),
        "parameters": parameters,
    }


def private_compiler() -> None:
    """Have torch compile, and load what it compiled, in a folder of this user alone.

    Its own choice is a name below the temporary folder that everybody can foretell: who makes that
    first has libraries of his run here. A folder that the environment names is left to its user.
    Requires: called before torch compiles or loads a package.

    Raises:
        ExportError: The folder could be another user's.
    """
    named = os.environ.get(_COMPILER_CACHE)
    if named is not None:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes seconds

        if Path(named) != Path(default_cache_dir()):  # which torch itself may have put there
            return
    try:
        folder = private.cache_folder("torch")
    except OSError:  # a home that cannot be written to, as in a container
        folder = private.temporary_folder()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    except private.NotPrivateError as error:
        raise ExportError(f"the compiler's cache: {error}") from error
    os.environ[_COMPILER_CACHE] = str(folder)


def private_headers() -> None:
    """Have torch keep precompiled headers, which are code, in the compiler's folder too.

    Torch itself takes the folder that everybody can foretell, whatever the environment says.
    Requires: `private_compiler` was called.
    """
    from torch._inductor import codecache, config

    headers = Path(os.environ[_COMPILER_CACHE]) / "precompiled_headers"
    known: Any = codecache  # not typed by torch
    if hasattr(known, "_HEADER_DIR") and hasattr(known, "_HEADER_LOCK_DIR"):
        known._HEADER_DIR, known._HEADER_LOCK_DIR = str(headers), str(headers / "locks")
    else:  # another torch: slower, and nothing is kept
        config.aot_inductor.precompile_headers = False


def export_dense(
    module: nn.Module,
    path: Path,
    *,
    dense_features: int,
    embedding_dim: int,
    heads: int = 1,
    contexts: Contexts | None = None,
    reduced_to: ReducedType | None = None,
    cpu: str = "x86-64-v3",
    cache: Path | None = None,
) -> None:
    """Write `module`, (dense_BD, embeddings_BE) -> scores_B, in eval mode as a package to `path`.

    Of several `heads` the module gives scores_BH, and the package a score_B for each. With
    `contexts`, the columns that are the user's, it has a program for users and candidates, too, and
    with `reduced_to` one in that type for each, where the net has layers that gain by it.
    Compiling takes about half a minute and needs g++; with `cache`, a folder, an equal program is
    taken from there, as from what a wheel brings. The values of the parameters play no part in it,
    those of constants do.

    Raises:
        ExportError: An unknown `cpu`, a parameter that is not fp32, no compiler, or torch's own
            reason.
    """
    if cpu not in _VECTOR_BITS:
        raise ExportError(f"cpu {cpu!r} is unknown; use one of {', '.join(_VECTOR_BITS)}")
    module = on_cpu(module)
    tensors = named_tensors(module)
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise ExportError(f"parameter {name!r} is {tensor.dtype}; parameters must be float32")
    try:
        with quiet_torch(), evaluating(module):
            programs = _programs(module, tensors, dense_features, embedding_dim, heads)
    except Exception as error:
        raise ExportError(f"torch.export refused the module: {error}") from error
    description = _description(tensors, dense_features, embedding_dim, heads, programs)
    precision = None
    if reduced_to is not None and _add_reduced(programs, description, list(tensors), reduced_to):
        precision = reduced.PRECISIONS[reduced_to]
    of_contexts = {} if contexts is None else {**column_ranges(contexts), "rewriting": REWRITING}
    told = json.dumps({**description, **of_contexts})
    name = f"{_digest(programs, told, cpu)}.pt2"
    try:
        cache = None if cache is None else private.trusted_folder(cache)
    except private.NotPrivateError as error:
        raise ExportError(f"the cache of programs: {error}") from error
    places = [folder / name for folder in (cache, _SHIPPED) if folder is not None]
    found = next((place for place in places if place.is_file()), None)
    if found is not None:
        _write(path, found.read_bytes())
        return
    if contexts is not None:
        # The cache knows it by the net alone: which program is found depends on measured costs.
        costs = None if cache is None else cache / COSTS
        with quiet_torch(), evaluating(module):
            more = context_programs(module, tensors, contexts, costs, precision=precision)
        if more is not None:
            programs |= more.programs
            description["context"] = more.description
    program = _compile(programs, cpu=cpu, description=json.dumps(description))
    _write(path, program)
    if cache is not None:
        try:
            _write(cache / name, program)
        except OSError as error:
            if not is_no_room(error):
                raise
            log.warning("%s: the program is not kept there", no_room(cache, error))


def _programs(
    module: nn.Module,
    tensors: dict[str, Tensor],
    dense_features: int,
    embedding_dim: int,
    heads: int,
) -> Programs:
    """Return the exported programs of a package by name: of any batch, of many, of one sample."""
    functional = _Functional(module, list(tensors), heads).eval()
    weights = tuple(tensor.clone() for tensor in tensors.values())

    def example(batch: int) -> tuple[Tensor, ...]:
        return torch.zeros(batch, dense_features), torch.zeros(batch, embedding_dim), *weights

    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    shapes: Any = ({0: batch}, {0: batch}, tuple({} for _ in tensors))
    programs = {_ANY_BATCH: torch.export.export(functional, example(3), dynamic_shapes=shapes)}
    gathers.take_ranges(programs[_ANY_BATCH])
    if products.first_batch(programs[_ANY_BATCH]):
        programs[products.NAME] = products.of(programs[_ANY_BATCH])
    if one_sample.gains(programs[_ANY_BATCH]):
        of_one = torch.export.export(functional, example(1))
        gathers.take_ranges(of_one)
        programs[one_sample.NAME] = one_sample.of(of_one)
    return programs


def _add_reduced(
    programs: Programs, description: dict[str, Any], names: list[str], kind: ReducedType
) -> bool:
    """Add the program in a type to those of a package; False: the net has no layers for it."""
    with quiet_torch():
        made = reduced.of(programs[_ANY_BATCH], reduced.PRECISIONS[kind])
    if made is None:
        log.warning("the dense net is served in fp32: it has no layer that gains by %s", kind)
        return False
    programs[reduced.NAME] = made.program
    # Behind dense_BD and embeddings_BE come the tensors.
    weights = [names[place - 2] for place in made.weights]
    description[reduced.NAME] = {"type": kind, "rows": made.rows, "weights": weights}
    return True


def _digest(programs: Programs, description: str, cpu: str) -> str:
    # The graph names its constants; their values are in the package as well.
    constants = {
        name: tensor.contiguous()
        for name, tensor in programs[_ANY_BATCH].constants.items()
        if isinstance(tensor, Tensor)
    }
    values = hashlib.sha256(safetensors.torch.save(constants)).hexdigest()
    # Without torch's local version, as +cpu: programs run on the CPU whatever else torch can use.
    version = torch.__version__.partition("+")[0]
    graphs = " ".join(str(program.graph) for program in programs.values())
    told = "".join(os.environ.get(name, "") for name in _COMPILER_OPTIONS)
    text = f"{version} {cpu} {description} {graphs} {values}{told}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _write(target: Path, data: bytes) -> None:
    """Have a file be these bytes, or as it was where they cannot be written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _compile(programs: Programs, *, cpu: str, description: str) -> bytes:
    """Return a package. It is made in memory: torch ends the process where a drive is full."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise ExportError(
            "compiling this dense net needs g++: apt-get install g++, or export where it is, by "
            "`embertide export-dense --cache`, and give that folder as --cache here"
        )
    private_compiler()
    import torch._inductor.package  # here, for it takes seconds

    private_headers()
    inductor: Any = torch._inductor  # not typed by torch
    package = io.BytesIO()
    settings: dict[str, Any] = {
        "aot_inductor.package": True,
        "aot_inductor.metadata": {"embertide": description},
        "cpp.march": cpu,
        "cpp.simdlen": _VECTOR_BITS[cpu],
        "cpp.threads": 1,
    }
    try:
        # Threads are fixed at compile time: with one there is no OpenMP region at all.
        with one_thread(), quiet_torch():
            compiled = {}
            for name, program in programs.items():
                more = one_sample.SETTINGS if name in (one_sample.NAME, ONE_USER) else {}
                inputs = program.example_inputs[0]
                graph = program.module(check_guards=False)
                with products.compiled(), reduced.compiled():
                    compiled[name] = inductor.aot_compile(graph, inputs, options=settings | more)
            inductor.package.package_aoti(package, compiled)
    except Exception as error:
        if is_no_room(error):
            places = {Path(tempfile.gettempdir()), Path(os.environ.get(_COMPILER_CACHE, "/tmp"))}
            place = min(places, key=lambda each: free_bytes(each) or 0)
            raise ExportError(
                f"compiling the dense net needs room for a while: {no_room(place, error)}: make "
                f"some, or name other folders, TMPDIR and {_COMPILER_CACHE}"
            ) from error
        raise ExportError(f"compiling the dense net for {cpu} failed: {error}") from error
    return package.getvalue()


def tensor_bytes(module: nn.Module, metadata: dict[str, str] | None = None) -> bytes:
    """Return the tensors of `module` as the bytes of a safetensors file; equal for equal values.

    `metadata` stands in its header.
    """
    tensors = {name: tensor.contiguous() for name, tensor in named_tensors(module).items()}
    return bytes(safetensors.torch.save(tensors, metadata))
