"""The second peer: the whole ranking model, tables and net, as one program of AOTInductor.

`bench/backends/aoti.cc` runs it in Triton. Row k of a table is that of key k, so nothing is hashed.
A program is compiled for this CPU and for a number of threads, and kept beside the peer's files.

Shapes: B samples, F features and tables, R rows a table, d values a row, D dense features.
"""

import os
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from bench import keys
from bench.shapes import Shape
from embertide.trainer.model.dlrm import Dlrm, Probability

Form = Literal["bags", "rows", "tuned"]
"""How a program reads and multiplies: 26 calls of torch's `EmbeddingBag`; lookups that AOTInductor
fuses; these, with products of its own templates and packed weights in place of MKL's."""
FORMS: tuple[Form, ...] = get_args(Form)

# MKL is not among the choices of "tuned": beside it, torch 2.13 makes a program that fails at other
# batches than the example's.
TUNED = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP"}
_MOST = 1 << 20
_EXAMPLE = 3


class _Model(nn.Module):
    def __init__(self, net: nn.Module, rows_FRd: NDArray[np.float32], form: Form) -> None:
        super().__init__()
        self.net = net
        self.bags = form == "bags"
        # Copies: of a view, torch would pack the rows of all tables.
        tables = [torch.from_numpy(np.array(rows_Rd)) for rows_Rd in rows_FRd]
        made = [
            nn.EmbeddingBag.from_pretrained(rows_Rd, mode="sum")
            if self.bags
            else nn.Embedding.from_pretrained(rows_Rd)
            for rows_Rd in tables
        ]
        self.tables = nn.ModuleList(made)

    def _vectors(self, keys_BF: Tensor) -> Iterator[Tensor]:
        """Yield vectors_Bd of each feature."""
        if self.bags:
            offsets_B = torch.arange(keys_BF.shape[0])  # len() would fix the batch
            columns_FB = keys_BF.t().contiguous()
            for table, keys_B in zip(self.tables, columns_FB.unbind(), strict=True):
                yield table(keys_B, offsets_B)
        else:
            for table, keys_B in zip(self.tables, keys_BF.unbind(1), strict=True):
                yield table(keys_B)

    def forward(self, keys_BF: Tensor, dense_BD: Tensor) -> Tensor:
        """Return scores_B1."""
        scores: Tensor = self.net(dense_BD, torch.cat(list(self._vectors(keys_BF)), 1))
        return scores.reshape(-1, 1)


def _model(shape: Shape, directory: Path, form: Form) -> nn.Module:
    net = Probability(Dlrm(shape.config()))
    net.load_state_dict(load_file(directory / "net.safetensors"))
    return _Model(net, np.load(directory / "tables.npy", mmap_mode="r"), form).eval()


@contextmanager
def _compiling(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # Imported here, for it takes seconds. The compiler's own copy is not kept: it holds the
        # tables, too.
        from torch._inductor.utils import fresh_cache

        with warnings.catch_warnings(), fresh_cache():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(before)


def program(shape: Shape, directory: Path, form: Form, threads: int) -> Path:
    """Return the package of a shape with one key a feature, as a folder; compile it if need be.

    Args:
        shape: The shape whose files the peer holds.
        directory: Those files: tables.npy [F,R,d] and net.safetensors.
        form: How it is written.
        threads: Threads of one run.
    """
    keys_BFL, dense_BD = keys.draw(shape, _EXAMPLE)
    batch = torch.export.Dim("batch", min=1, max=_MOST)
    return compiled(
        directory / f"{form}-t{threads}-{_cpu()}",
        lambda: _model(shape, directory, form),
        (torch.from_numpy(keys_BFL[:, :, 0].copy()), torch.from_numpy(dense_BD)),
        ({0: batch}, {0: batch}),
        threads=threads,
        configs=TUNED if form == "tuned" else {},
    )


def _cpu() -> str:
    return torch.backends.cpu.get_cpu_capability().lower()


def compiled(
    path: Path,
    model: Callable[[], nn.Module],
    example: tuple[Tensor, ...],
    dynamic_shapes: tuple[Any, ...],
    *,
    threads: int,
    configs: Mapping[str, Any],
) -> Path:
    """Return the folder of a model's package, and compile it if it is not there.

    Of a file, torch would unpack a copy for each model, and hold its place until the server ends.

    Args:
        path: Where it goes.
        model: Makes the model.
        example: Inputs of it.
        dynamic_shapes: As torch.export takes them.
        threads: Threads of one run.
        configs: Of the compiler, beside the number of threads.
    """
    if path.is_dir():
        return path
    partial = path.with_name(f".{os.getpid()}-{path.name}")
    package = partial.with_suffix(".pt2")
    inductor: Any = torch._inductor  # not typed by torch
    with _compiling(threads), torch.no_grad():
        exported = torch.export.export(model(), example, dynamic_shapes=dynamic_shapes)
        inductor.aoti_compile_and_package(
            exported,
            package_path=str(package),
            inductor_configs={"cpp.threads": threads, **configs},
        )
    with zipfile.ZipFile(package) as files:
        files.extractall(partial)
    package.unlink()
    partial.rename(path)
    return path
