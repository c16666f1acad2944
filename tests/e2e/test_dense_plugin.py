"""The dense plugin by its C ABI: programs run, and opened at once, as by the models of a server."""

import ctypes
import dataclasses
import itertools
import json
import re
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch  # the plugin's own torch
from rewriting import Net, joined
from torch import Tensor, nn

from embertide.trainer.config import ReducedType
from embertide.trainer.model import one_sample, products
from embertide.trainer.model.build import build_net
from embertide.trainer.model.dlrm import Probability
from embertide.trainer.model.export import export_dense, named_tensors
from embertide.trainer.model.reduced import PRECISIONS, multiplying_in
from embertide.trainer.model.rewrite.package import contexts_of_model
from embertide.trainer.presets import PRESETS

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
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_char_p,
    ctypes.c_size_t,
)
_READY, _NO_CPU, _UNKNOWN = 1, 2, 3


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


_RUN_CONTEXTS = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
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
        ("run_contexts", _RUN_CONTEXTS),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        ("dense_features", ctypes.c_uint32),
        ("embedding_dim", ctypes.c_uint32),
        ("heads", ctypes.c_uint32),
        ("reduced", ctypes.c_int),
        ("reduced_type", ctypes.c_char_p),
        ("context_dense", ctypes.POINTER(ctypes.c_uint8)),
        ("context_embeddings", ctypes.POINTER(ctypes.c_uint8)),
    )


class _Contexts(ctypes.Structure):
    _fields_ = (
        ("users", ctypes.c_int64),
        ("candidates", ctypes.c_int64),
        ("context_dense", ctypes.c_void_p),
        ("context_embeddings", ctypes.c_void_p),
        ("candidate_dense", ctypes.c_void_p),
        ("candidate_embeddings", ctypes.c_void_p),
        ("user_of", ctypes.c_void_p),
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


class _Opened:
    """A package and the weights of a net. A context manager."""

    def __init__(
        self, plugin: Any, package: Path, net: nn.Module, *, reduced: bool = False
    ) -> None:
        self._plugin, self._package, self._net = plugin, package, net
        self._reduced = reduced
        self._program, self._weights = ctypes.c_void_p(), ctypes.c_void_p()
        self._error = ctypes.create_string_buffer(400)
        self.shape = _Shape()

    def __enter__(self) -> Self:
        tensors = named_tensors(self._net)
        named = (_Tensor * len(tensors))()
        shapes = [(ctypes.c_int64 * each.dim())(*each.shape) for each in tensors.values()]
        for slot, (name, each), shape in zip(named, tensors.items(), shapes, strict=True):
            slot.name, slot.shape, slot.rank = name.encode(), shape, each.dim()
            slot.values = each.data_ptr()
        program, said = ctypes.byref(self._program), ctypes.byref(self.shape)
        self._done(self._plugin.open(str(self._package).encode(), program, said, *self._said))
        loaded = ctypes.byref(self._weights)
        what = (named, len(tensors), int(self._reduced), loaded)
        self._done(self._plugin.load(self._program, *what, *self._said))
        return self

    def __exit__(self, *error: object) -> None:
        self._plugin.drop(self._weights)
        self._plugin.close(self._program)

    @property
    def _said(self) -> tuple[Any, int]:
        return self._error, 400

    def _done(self, result: int) -> None:
        assert result == 0, self._error.value

    def run(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        """Return the scores of samples."""
        score_B = torch.zeros(len(dense_BD))
        heads = (ctypes.c_void_p * 1)(score_B.data_ptr())
        values = (dense_BD.data_ptr(), embeddings_BE.data_ptr())
        ran = self._plugin.run(
            self._program, self._weights, len(score_B), *values, heads, *self._said
        )
        self._done(ran)
        return score_B

    def run_contexts(self, split: tuple[Tensor, ...], user_of_row_B: Tensor) -> Tensor:
        """Return the scores of candidates."""
        score_B = torch.zeros(len(user_of_row_B))
        heads = (ctypes.c_void_p * 1)(score_B.data_ptr())
        values = (each.data_ptr() for each in (*split, user_of_row_B))
        request = _Contexts(len(split[0]), len(score_B), *values)
        given = ctypes.byref(request)
        ran = self._plugin.run_contexts(self._program, self._weights, given, heads, *self._said)
        self._done(ran)
        return score_B


def _scores(plugin: Any, package: Path, net: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """Return what a package scores with a net's weights."""
    with _Opened(plugin, package, net) as opened:
        return opened.run(*inputs)


def half_less(
    made: Callable[..., torch.export.ExportedProgram],
) -> Callable[..., torch.export.ExportedProgram]:
    """Return what makes a program, but one that scores a half less: so it shows that it was run."""

    def less(program: torch.export.ExportedProgram, *rows: int) -> torch.export.ExportedProgram:
        wrapped: Any = made(program, *rows).module(check_guards=False)

        class Less(nn.Module):
            def forward(self, *inputs: Tensor) -> Tensor:
                score_B: Tensor = wrapped(*inputs) - 0.5
                return score_B

        batch = torch.export.Dim("batch", min=1, max=1 << 20)
        given = program.example_inputs[0]
        rows_of = [{0: batch} if n < 2 and len(given[0]) > 1 else {} for n in range(len(given))]
        return torch.export.export(Less(), given, dynamic_shapes=(tuple(rows_of),))

    return less


def test_one_sample_has_a_program_of_its_own(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, inputs = Wide().eval(), (torch.rand(3, 2), torch.rand(3, 4))
    monkeypatch.setattr(one_sample, "of", half_less(one_sample.of))
    path = tmp_path / "net.pt2"
    export_dense(net, path, dense_features=2, embedding_dim=4, cache=CACHE)
    with torch.no_grad():
        want_B = net(*inputs)
    assert torch.allclose(_scores(plugin, path, net, inputs), want_B, atol=1e-6)
    for i, want in enumerate(want_B):
        one = (inputs[0][i : i + 1], inputs[1][i : i + 1])
        assert torch.allclose(_scores(plugin, path, net, one), want - 0.5, atol=1e-6)


def test_many_samples_have_one_where_the_matrix_library_is_slow(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By oneDNN, as MKL leaves AVX-512 of AMD's CPUs unused; elsewhere all run the other one."""
    net = Wide().eval()
    plain, marked = tmp_path / "net.pt2", tmp_path / "marked.pt2"
    export_dense(net, plain, dense_features=2, embedding_dim=4, cache=CACHE)
    monkeypatch.setattr(products, "of", half_less(products.of))
    export_dense(net, marked, dense_features=2, embedding_dim=4, cache=CACHE)
    first = 8  # 950,000 multiplications of the layer with 333 * 401 weights
    for batch in (first - 1, first, 300):
        inputs = torch.rand(batch, 2), torch.rand(batch, 4)
        with torch.no_grad():
            want_B = net(*inputs)
        assert torch.allclose(_scores(plugin, plain, net, inputs), want_B, atol=1e-5)
        less = 0.5 if PACKS and batch >= first else 0.0
        assert torch.allclose(_scores(plugin, marked, net, inputs), want_B - less, atol=1e-5)


USER_OF_NEWS = tuple(each.name for each in PRESETS["news"]().features if each.name != "cand")
PACKS = "avx512f" in Path("/proc/cpuinfo").read_text().split()


def _products_and_reorders(said: str) -> tuple[int, int]:
    ran = [line for line in said.splitlines() if ",exec," in line]
    products = [line for line in ran if ",inner_product," in line or ",matmul," in line]
    return len(products), sum(",reorder," in line for line in ran)


@pytest.mark.skipif(not PACKS, reason="nodes pack nothing without AVX-512")
def test_weights_in_fp32_are_packed_once_a_version(
    plugin: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    net, path = Wide().eval(), tmp_path / "net.pt2"
    export_dense(net, path, dense_features=2, embedding_dim=4, cache=CACHE)
    mkldnn: Any = torch.backends.mkldnn
    with mkldnn.verbose(mkldnn.VERBOSE_ON):
        capfd.readouterr()
        with _Opened(plugin, path, net) as opened:
            _, reorders = _products_and_reorders(capfd.readouterr().out)
            assert reorders == 1  # of the one layer with enough weights
            for _ in range(5):
                opened.run(torch.rand(64, 2), torch.rand(64, 4))
            assert _products_and_reorders(capfd.readouterr().out) == (5, 0)


@pytest.mark.parametrize("where", ["packed", "context packed", "context one_user_packed"])
def test_a_package_that_packs_what_it_has_not_is_refused(
    plugin: Any, tmp_path: Path, where: str
) -> None:
    if not PACKS and where != "context one_user_packed":
        pytest.skip("nodes pack nothing without AVX-512")
    model = dataclasses.replace(PRESETS["news"](), context=USER_OF_NEWS)
    contexts = contexts_of_model(model)
    assert contexts is not None
    net, path = Probability(build_net(model)).eval(), tmp_path / "net.pt2"
    dense, embeddings = len(contexts.dense), len(contexts.embeddings)
    export_dense(
        net, path, dense_features=dense, embedding_dim=embeddings, contexts=contexts, cache=CACHE
    )
    forged = tmp_path / "forged.pt2"
    with zipfile.ZipFile(path) as given, zipfile.ZipFile(forged, "w") as made:
        for each in given.infolist():
            data = given.read(each)
            if each.filename.endswith("_metadata.json"):
                whole = json.loads(data)
                told = json.loads(whole["embertide"])
                *inside, name = where.split()
                if name == "one_user_packed" and "one_user" not in told["context"]:
                    pytest.skip("no program of one user is faster on this CPU")
                (told[inside[0]] if inside else told)[name] = [1000]
                data = json.dumps(whole | {"embertide": json.dumps(told)}).encode()
            made.writestr(each, data)
    program, shape = ctypes.c_void_p(), _Shape()
    error = ctypes.create_string_buffer(400)
    named, opened = str(forged).encode(), ctypes.byref(program)
    assert plugin.open(named, opened, ctypes.byref(shape), error, 400) != 0
    name = where.split()[-1]
    assert f'says "{name}" of a tensor beyond its' in error.value.decode()


def test_a_package_whose_name_is_gone_is_opened_by_a_file_that_is_held(
    plugin: Any, tmp_path: Path
) -> None:
    net, path = Layers(1).eval(), tmp_path / "net.pt2"
    export_dense(net, path, dense_features=2, embedding_dim=4, cache=CACHE)
    inputs = torch.rand(3, 2), torch.rand(3, 4)
    with path.open("rb") as held, torch.no_grad():
        path.unlink()
        scores = _scores(plugin, Path(f"/proc/self/fd/{held.fileno()}"), net, inputs)
        assert torch.allclose(scores, net(*inputs), atol=1e-6)


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
        shape, error = _Shape(), ctypes.create_string_buffer(400)
        named, opened = str(path).encode(), ctypes.byref(program)
        failed = plugin.open(named, opened, ctypes.byref(shape), error, 400)
        if not failed:
            # Without parameters, the refusal says how many there should be.
            plugin.load(program, None, 0, 0, ctypes.byref(weights), error, 400)
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


@pytest.mark.parametrize("preset", ["news", pytest.param("news-crossed", marks=pytest.mark.long)])
def test_what_is_the_users_is_computed_once_a_user(
    plugin: Any, tmp_path: Path, preset: str
) -> None:
    """Scores are those of the plain program, for any numbers of users and candidates."""
    model = PRESETS[preset]()
    own = tuple(name for name in USER_OF_NEWS if name in {f.name for f in model.event_features})
    model = dataclasses.replace(model, context=own)
    contexts = contexts_of_model(model)
    assert contexts is not None
    net = Probability(build_net(model)).eval()
    path = tmp_path / "net.pt2"
    dense, embeddings = len(contexts.dense), len(contexts.embeddings)
    export_dense(
        net, path, dense_features=dense, embedding_dim=embeddings, contexts=contexts, cache=CACHE
    )
    with _Opened(plugin, path, net) as opened:
        marks = opened.shape.context_embeddings[:embeddings]
        assert [bool(mark) for mark in marks] == [*contexts.embeddings]
        for users, candidates in ((1, 1), (1, 256), (3, 7), (40, 41)):
            split, user_of_row_B = Net.of(net, contexts).request(users, candidates)
            got_B = opened.run_contexts(split, user_of_row_B)
            want_B = opened.run(*joined(contexts, split, user_of_row_B))
            assert (got_B - want_B).abs().max() <= 1e-6 * want_B.abs().max()
            assert got_B.unique().numel() > 1 or candidates == 1


# --- in reduced precision -------------------------------------------------------------------------

_FLAGS = frozenset(Path("/proc/cpuinfo").read_text().split())
HAS = {"bf16": "avx512_bf16" in _FLAGS, "int8": bool({"avx512_vnni", "avx_vnni"} & _FLAGS)}
NEEDS_BF16 = pytest.mark.skipif(not HAS["bf16"], reason="this CPU has no AVX512-BF16")
TYPES = [
    pytest.param(kind, marks=pytest.mark.skipif(not has, reason=f"this CPU has no {kind}"))
    for kind, has in HAS.items()
]
Wides = dict[ReducedType, tuple[Path, nn.Module]]


@pytest.fixture(scope="module", name="wides")
def _wides(tmp_path_factory: pytest.TempPathFactory) -> Wides:
    torch.manual_seed(2)
    net, folder = Wide().eval(), tmp_path_factory.mktemp("reduced")
    for kind in PRECISIONS:
        path = folder / f"{kind}.pt2"
        export_dense(net, path, dense_features=2, embedding_dim=4, reduced_to=kind, cache=CACHE)
    return {kind: (folder / f"{kind}.pt2", net) for kind in PRECISIONS}


@pytest.mark.parametrize("kind", list(HAS))
def test_a_package_says_whether_this_cpu_can_run_it_in_reduced_precision(
    plugin: Any, wides: Wides, tmp_path: Path, kind: ReducedType
) -> None:
    plain = tmp_path / "net.pt2"
    export_dense(wides[kind][1], plain, dense_features=2, embedding_dim=4, cache=CACHE)
    with _Opened(plugin, *wides[kind]) as opened:
        assert opened.shape.reduced == (_READY if HAS[kind] else _NO_CPU)
        assert opened.shape.reduced_type == kind.encode()
    with _Opened(plugin, plain, wides[kind][1]) as opened:
        assert opened.shape.reduced == 0
        assert opened.shape.reduced_type is None


def test_a_type_of_a_later_build_is_told(plugin: Any, wides: Wides, tmp_path: Path) -> None:
    path, later = wides["int8"][0], tmp_path / "later.pt2"
    known, unknown = (b'\\"type\\": \\"%s\\"' % kind for kind in (b"int8", b"fp88"))
    with zipfile.ZipFile(path) as package, zipfile.ZipFile(later, "w") as other:
        for info in package.infolist():
            other.writestr(info, package.read(info).replace(known, unknown))
    with _Opened(plugin, later, wides["int8"][1]) as opened:
        assert opened.shape.reduced == _UNKNOWN
        assert opened.shape.reduced_type == b"fp88"
        opened.run(torch.rand(64, 2), torch.rand(64, 4))


def test_a_program_in_int8_reads_whole_vectors_of_sums(wides: Wides) -> None:
    """By torch's own way, through the stack, it takes twice as long."""
    reads = []
    with zipfile.ZipFile(wides["int8"][0]) as package:
        for name in package.namelist():
            if name.endswith(".cpp"):
                reads += re.findall(rb"Vectorized<int32_t>::loadu\(.*\);", package.read(name))
    whole = [each for each in reads if b", static_cast<int64_t>(8)" not in each]
    assert len(whole) >= 1
    assert b", static_cast<int64_t>(8))" not in b"".join(reads)


@pytest.mark.parametrize("kind", TYPES)
def test_many_samples_are_scored_in_a_type_where_the_weights_were_loaded_so(
    plugin: Any, wides: Wides, kind: ReducedType
) -> None:
    wide = wides[kind]
    with _Opened(plugin, *wide, reduced=True) as quick, _Opened(plugin, *wide) as exact:
        for batch in (1, 7, 8, 64, 300):
            inputs = torch.rand(batch, 2), torch.rand(batch, 4)
            with torch.no_grad():
                fp32_B = wide[1](*inputs)
                with multiplying_in(PRECISIONS[kind]):
                    reduced_B = wide[1](*inputs)
            assert torch.allclose(exact.run(*inputs), fp32_B, atol=1e-5)
            # Few samples do not gain, and are scored in fp32.
            want_B = reduced_B if batch >= 8 else fp32_B
            assert torch.allclose(quick.run(*inputs), want_B, atol=1e-5)
            assert batch < 8 or float((reduced_B - fp32_B).abs().max()) > 1e-4


@NEEDS_BF16
def test_weights_are_converted_once_a_version_and_not_by_requests(
    plugin: Any, wides: Wides, capfd: pytest.CaptureFixture[str]
) -> None:
    mkldnn: Any = torch.backends.mkldnn

    def reorders() -> int:
        return _products_and_reorders(capfd.readouterr().out)[1]

    with mkldnn.verbose(mkldnn.VERBOSE_ON):
        reorders()
        with _Opened(plugin, *wides["bf16"], reduced=True) as opened:
            # The one layer in bf16, and in fp32 for few samples, where their product is oneDNN's.
            assert reorders() == 1 + PACKS
            for _ in range(5):
                opened.run(torch.rand(64, 2), torch.rand(64, 4))
            assert _products_and_reorders(capfd.readouterr().out) == (5, 0)


@pytest.mark.parametrize(
    "kind", [pytest.param("bf16", marks=[NEEDS_BF16, pytest.mark.long]), TYPES[-1]]
)
def test_candidates_are_scored_in_a_type_too(
    plugin: Any, tmp_path: Path, kind: ReducedType
) -> None:
    model = dataclasses.replace(PRESETS["news"](), context=USER_OF_NEWS)
    contexts = contexts_of_model(model)
    assert contexts is not None
    torch.manual_seed(4)
    net, path = Probability(build_net(model)).eval(), tmp_path / "net.pt2"
    export_dense(
        net,
        path,
        dense_features=len(contexts.dense),
        embedding_dim=len(contexts.embeddings),
        contexts=contexts,
        reduced_to=kind,
        cache=CACHE,
    )
    with _Opened(plugin, path, net, reduced=True) as quick, _Opened(plugin, path, net) as exact:
        split, user_of_row_B = Net.of(net, contexts).request(3, 300)
        got_B, want_B = (each.run_contexts(split, user_of_row_B) for each in (quick, exact))
        assert 0 < float((got_B - want_B).abs().max()) < 0.01
