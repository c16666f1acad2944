"""Exporting a net that somebody else wrote: any `nn.Module`, (dense_BD, embeddings_BE) -> scores_B.

The module is named as `package.module:factory`, made by calling the factory, tried on zeros,
exported, and the package is compared with the module before anything is kept.

Shapes: B samples, D dense features, E all embedding values of a sample.
"""

import dataclasses
import inspect
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import Tensor, nn

from embertide.trainer.config import user_objects
from embertide.trainer.config.model import MAX_HEADS
from embertide.trainer.model import one_sample
from embertide.trainer.model.export import (
    ExportError,
    export_dense,
    named_tensors,
    private_compiler,
    tensor_bytes,
)
from embertide.trainer.model.quiet import quiet_torch
from embertide.trainer.publish.importer.dense_folder import PROGRAM, TENSORS, write_description

TOLERANCE = 1e-5
"""How far the package's scores may lie from the module's: the order of sums differs, no more."""

_OPTIONS = (
    "check --dense-features and --embedding-dim, the sum of the features' dims in the order of the "
    "features"
)

# CPU features that a baseline needs, as far as they tell it from the next lower one.
_CPU_FLAGS = {
    "x86-64-v2": {"sse4_2"},
    "x86-64-v3": {"avx2", "fma", "bmi2", "f16c"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DenseShape:
    """Columns of the two inputs, the CPU baseline of the program, and its scores' names.

    Attributes:
        heads: Empty: one score, without a name; else several.
    """

    dense_features: int
    embedding_dim: int
    cpu: str = "x86-64-v3"
    heads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse widths of nothing."""
        if self.dense_features < 0:
            raise ExportError(f"dense_features is {self.dense_features}; give 0 or more")
        if self.embedding_dim < 1:
            raise ExportError(f"embedding_dim is {self.embedding_dim}; give 1 or more")
        if len(self.heads) == 1 or len(set(self.heads)) < len(self.heads) or "" in self.heads:
            raise ExportError(
                f"heads are {list(self.heads)}; give two or more of them, each a name of its own, "
                "or none"
            )
        if len(self.heads) > MAX_HEADS:
            raise ExportError(f"heads are {len(self.heads)}; give {MAX_HEADS} at most")

    @property
    def outputs(self) -> int:
        """Scores of a sample."""
        return max(len(self.heads), 1)

    def inputs(self, batch: int, fill: Callable[..., Tensor] = torch.zeros) -> tuple[Tensor, ...]:
        """Return (dense_BD, embeddings_BE)."""
        return fill(batch, self.dense_features), fill(batch, self.embedding_dim)


def load_module(target: str) -> nn.Module:
    """Import `package.module:factory`, with the working directory on sys.path, and call it.

    Raises:
        ExportError: There is no such module or factory, it fails, or it gives no nn.Module.
    """
    found = user_objects.find(target, ExportError)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise ExportError(f"{target!r} is {found!r}; give a function that makes an nn.Module")
    try:
        made = found()
    except Exception as error:
        raise ExportError(f"calling {target!r} without arguments failed: {error!r}") from error
    if not isinstance(made, nn.Module):
        raise ExportError(f"{target!r} gives a {type(made).__name__}; it must give an nn.Module")
    return made


def load_weights(module: nn.Module, path: Path) -> list[str]:
    """Load a state_dict (.pt) or safetensors file, and return the names in it that went unused.

    Raises:
        ExportError: The file cannot be read, or lacks a parameter, or has one of another shape.
    """
    if not path.is_file():
        raise ExportError(f"{path} is missing; give a .pt or .safetensors file")
    try:
        if path.suffix == ".safetensors":
            state: Any = safetensors.torch.load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ExportError(f"{path} cannot be read as weights: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ExportError(f"{path} holds no state_dict; save one with torch.save(net.state_dict())")
    try:
        result = module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ExportError(f"{path} does not fit the module: {error}") from error
    if result.missing_keys:
        raise ExportError(
            f"{path} lacks {', '.join(result.missing_keys)}; it holds {', '.join(state)}"
        )
    return sorted(result.unexpected_keys)


def check_module(
    module: nn.Module, shape: DenseShape, *, outputs: int = 1, hint: str = _OPTIONS
) -> None:
    """Run the module on zeros, at two batch sizes.

    Args:
        module: In eval mode.
        shape: The shape of its inputs.
        outputs: Scores a sample.
        hint: The thing to check when forward fails.

    Raises:
        ExportError: It does not take (dense_BD, embeddings_BE), or does not give one finite
            float32 score a sample.
    """
    try:
        inspect.signature(module.forward).bind(None, None)
    except TypeError as error:
        raise ExportError(
            f"forward{inspect.signature(module.forward)} does not take (dense, embeddings): {error}"
        ) from error
    for batch in (1, 3):
        inputs = shape.inputs(batch)
        sizes = " and ".join(str(list(each.shape)) for each in inputs)
        try:
            with torch.no_grad():
                scores = module(*inputs)
        except Exception as error:
            raise ExportError(f"forward failed on zeros of {sizes}: {error}; {hint}") from error
        if not isinstance(scores, Tensor):
            raise ExportError(f"forward gives a {type(scores).__name__}; it must give a tensor")
        if list(scores.shape) not in ([batch, outputs], [batch] if outputs == 1 else []):
            wanted = f"one score a sample, [{batch}] or [{batch}, 1]"
            if outputs > 1:
                wanted = f"{outputs} scores a sample, [{batch}, {outputs}]"
            raise ExportError(
                f"forward gives shape {list(scores.shape)} for {batch} samples; it must give "
                f"{wanted}"
            )
        if scores.dtype != torch.float32:
            raise ExportError(f"scores are {scores.dtype}; they must be float32")
        if not bool(torch.isfinite(scores).all()):
            raise ExportError("a score of zeros is not finite; are the weights loaded?")


def can_run(cpu: str) -> bool:
    """Return whether this machine runs programs of a baseline."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return _CPU_FLAGS.get(cpu, {"unknown"}) <= set(flags)


def largest_difference(module: nn.Module, program: Path, shape: DenseShape) -> float:
    """Return how far a package's scores lie from the module's, over some random batches."""
    private_compiler()
    inductor: Any = torch._inductor  # not typed by torch
    generator = torch.Generator().manual_seed(1)
    tensors = list(named_tensors(module).values())
    largest = 0.0
    with quiet_torch(), torch.no_grad():
        package = inductor.aoti_load_package(str(program))
        cases = [(package, batch) for batch in (1, 3, 64)]
        if json.loads(package.get_metadata()["embertide"]).get(one_sample.NAME):
            cases.append((inductor.package.load_package(str(program), one_sample.NAME), 1))
        for scorer, batch in cases:
            inputs = shape.inputs(batch, lambda *s: torch.randn(*s, generator=generator))
            want = cast(Tensor, module(*inputs)).reshape(batch, -1)
            said = scorer(*inputs, *tensors)  # of several heads, a tuple
            got = torch.stack(said if isinstance(said, tuple) else (said,), dim=1)
            # A NaN on one side alone is a difference, too.
            off = torch.nan_to_num((got - want).abs(), nan=torch.inf)
            off = torch.where(got.isnan() & want.isnan(), torch.zeros_like(off), off)
            largest = max(largest, float(off.max()))
    return largest


def _export_checked(
    module: nn.Module, path: Path, shape: DenseShape, cache: Path | None
) -> float | None:
    export_dense(
        module,
        path,
        dense_features=shape.dense_features,
        embedding_dim=shape.embedding_dim,
        heads=shape.outputs,
        cpu=shape.cpu,
        cache=cache,
    )
    if not can_run(shape.cpu):
        return None
    difference = largest_difference(module, path, shape)
    if difference > TOLERANCE:
        raise ExportError(
            f"the compiled net's scores differ from the module's by {difference:.2g}, more than "
            f"{TOLERANCE:.0e}; does it draw random numbers, or keep state between calls?"
        )
    return difference


def export_folder(
    module: nn.Module,
    folder: Path,
    shape: DenseShape,
    *,
    cache: Path | None = None,
    **more: object,
) -> dict[str, Any]:
    """Check and export a module to `folder`, which must not exist, and return what dense.json says.

    The module is put into eval mode. Where this
    machine cannot run the baseline, the package is not compared, and `max_difference` is null.

    Args:
        module: The net.
        folder: Appears whole or not at all.
        shape: The shape of its inputs.
        cache: A folder of compiled programs to take from and add to.
        more: Facts to note in dense.json.

    Raises:
        ExportError: The module is not what it should be, or the folder cannot be written.
    """
    if folder.exists():
        raise ExportError(f"{folder} exists and is kept; give another output")
    if not named_tensors(module):
        raise ExportError("the module has no parameter; register a buffer if it needs none")
    module.cpu().eval()
    check_module(module, shape, outputs=shape.outputs)
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        parent = folder.absolute().parent
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=parent) as temporary:
            made = Path(temporary) / "dense"
            made.mkdir()
            difference = _export_checked(module, made / PROGRAM, shape, cache)
            (made / TENSORS).write_bytes(tensor_bytes(module))
            description = write_description(
                made,
                cpu=shape.cpu,
                dense_features=shape.dense_features,
                embedding_dim=shape.embedding_dim,
                heads=shape.heads,
                parameters=sum(each.numel() for each in named_tensors(module).values()),
                max_difference=difference,
                torch=torch.__version__,
                **more,
            )
            shutil.move(made, folder)
    except OSError as error:
        raise ExportError(f"{folder} cannot be written: {error}") from error
    return description
