"""The dense plugin by its C ABI: programs run, and opened at once, as by the models of a server."""

import ctypes
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch  # the plugin's own torch
from torch import Tensor, nn

from embertide.trainer.model import one_sample
from embertide.trainer.model.export import export_dense, named_tensors

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "build" / "cpp" / "backends" / "embertide" / "libembertide_dense.so"
CACHE = ROOT / "build" / "cache" / "dense"
ROUNDS = 60  # without the lock, one opening in 25 went wrong
AT_ONCE = 4
_OPEN = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_size_t,
)
_CLOSE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_LOAD = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_char_p,
    ctypes.c_size_t,
)


_RUN = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_size_t,
)


class _Plugin(ctypes.Structure):
    _fields_ = (
        ("abi", ctypes.c_uint32),
        ("open", _OPEN),
        ("close", _CLOSE),
        ("load", _LOAD),
        ("drop", _CLOSE),
        ("run", _RUN),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_size_t),
        ("values", ctypes.c_void_p),
    )


class Layers(nn.Module):
    """So many layers, so that programs differ in their parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))

    def forward(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        score_B: Tensor = torch.sigmoid(self.layers(embeddings_BE).sum(1) + dense_BD.sum(1))
        return score_B


class Wide(nn.Module):
    """Layers of so many weights that one sample has a program of its own; their widths are odd."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 333), nn.ReLU(), nn.Linear(333, 401))

    def forward(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        seen_BK = torch.cat([dense_BD, embeddings_BE], 1)
        score_B: Tensor = torch.sigmoid(self.layers(seen_BK).sum(1))
        return score_B


@pytest.fixture(scope="module", name="plugin")
def _plugin() -> Any:
    library = ctypes.CDLL(str(PLUGIN))
    library.embertide_dense_plugin.restype = ctypes.POINTER(_Plugin)
    return library.embertide_dense_plugin().contents


def _scores(plugin: Any, package: Path, net: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """Return what a package scores with a net's weights."""
    tensors = named_tensors(net)
    named = (_Tensor * len(tensors))()
    shapes = [(ctypes.c_int64 * each.dim())(*each.shape) for each in tensors.values()]
    for slot, (name, each), shape in zip(named, tensors.items(), shapes, strict=True):
        slot.name, slot.shape, slot.rank = name.encode(), shape, each.dim()
        slot.values = each.data_ptr()
    program, weights = ctypes.c_void_p(), ctypes.c_void_p()
    said, error = (ctypes.c_uint32 * 3)(), ctypes.create_string_buffer(400)
    score_B = torch.zeros(len(inputs[0]))
    heads = (ctypes.c_void_p * 1)(score_B.data_ptr())
    assert not plugin.open(str(package).encode(), ctypes.byref(program), said, error, 400), error
    try:
        loaded = ctypes.byref(weights)
        assert not plugin.load(program, named, len(tensors), loaded, error, 400), error.value
        values = [each.data_ptr() for each in inputs]
        assert not plugin.run(program, weights, len(score_B), *values, heads, error, 400), error
        plugin.drop(weights)
    finally:
        plugin.close(program)
    return score_B


def test_one_sample_has_a_program_of_its_own(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its program is made to score a half less, so that it shows which one was run."""
    net, inputs = Wide().eval(), (torch.rand(3, 2), torch.rand(3, 4))
    exported = one_sample.of

    def half_less(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
        wrapped: Any = program.module(check_guards=False)

        class Less(nn.Module):
            def forward(self, *inputs: Tensor) -> Tensor:
                score_B: Tensor = wrapped(*inputs) - 0.5
                return score_B

        return exported(torch.export.export(Less(), program.example_inputs[0]))

    monkeypatch.setattr(one_sample, "of", half_less)
    path = tmp_path / "net.pt2"
    export_dense(net, path, dense_features=2, embedding_dim=4, cache=CACHE)
    with torch.no_grad():
        want_B = net(*inputs)
    assert torch.allclose(_scores(plugin, path, net, inputs), want_B, atol=1e-6)
    for i, want in enumerate(want_B):
        one = (inputs[0][i : i + 1], inputs[1][i : i + 1])
        assert torch.allclose(_scores(plugin, path, net, one), want - 0.5, atol=1e-6)


def test_programs_opened_at_once_keep_their_own_descriptions(plugin: Any, tmp_path: Path) -> None:
    wanted = {}
    for count in (1, 3):
        path, net = tmp_path / f"{count}.pt2", Layers(count)
        export_dense(net, path, dense_features=2, embedding_dim=4, cache=CACHE)
        wanted[path] = f"the program has {len(named_tensors(net))} parameters"
    said: list[tuple[Path, str]] = []

    def open_one(path: Path, together: threading.Barrier) -> None:
        together.wait()
        program, weights = ctypes.c_void_p(), ctypes.c_void_p()
        shape, error = (ctypes.c_uint32 * 3)(), ctypes.create_string_buffer(400)
        failed = plugin.open(str(path).encode(), ctypes.byref(program), shape, error, 400)
        if not failed:
            # Of no parameters: the refusal says how many there should be.
            plugin.load(program, None, 0, ctypes.byref(weights), error, 400)
            plugin.close(program)
        said.append((path, error.value.decode()))

    for _ in range(ROUNDS):
        together = threading.Barrier(AT_ONCE)
        threads = [
            threading.Thread(target=open_one, args=(path, together))
            for path in itertools.islice(itertools.cycle(wanted), AT_ONCE)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(said) == ROUNDS * AT_ONCE
    assert [(path, what) for path, what in said if not what.startswith(wanted[path])] == []
