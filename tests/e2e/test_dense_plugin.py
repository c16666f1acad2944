"""The dense plugin by its C ABI: programs opened at once, as the models of a server are."""

import ctypes
import threading
from pathlib import Path

import torch  # the plugin's own torch
from torch import Tensor, nn

from embertide.trainer.model.export import export_dense, named_tensors

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "build" / "cpp" / "backends" / "embertide" / "libembertide_dense.so"
CACHE = ROOT / "build" / "cache" / "dense"
ROUNDS = 400
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


class _Plugin(ctypes.Structure):
    _fields_ = (("abi", ctypes.c_uint32), ("open", _OPEN), ("close", _CLOSE), ("load", _LOAD))


class Layers(nn.Module):
    """So many layers, so that programs differ in their parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))

    def forward(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        score_B: Tensor = torch.sigmoid(self.layers(embeddings_BE).sum(1) + dense_BD.sum(1))
        return score_B


def test_programs_opened_at_once_keep_their_own_descriptions(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(PLUGIN))
    library.embertide_dense_plugin.restype = ctypes.POINTER(_Plugin)
    plugin = library.embertide_dense_plugin().contents
    wanted = {}
    for count in (1, 2, 3):
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
        together = threading.Barrier(len(wanted))
        threads = [threading.Thread(target=open_one, args=(path, together)) for path in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(said) == ROUNDS * len(wanted)
    assert [(path, what) for path, what in said if not what.startswith(wanted[path])] == []
