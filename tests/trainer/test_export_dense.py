"""Exporting a net of somebody else's: the folder it makes, and what is refused and why."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import typer
from torch import Tensor, nn
from typer.testing import CliRunner

from embertide.trainer.commands import export_dense as export_command
from embertide.trainer.config import FeatureConfig
from embertide.trainer.model import foreign
from embertide.trainer.model.export import ExportError
from embertide.trainer.publish.importer.model import ImportOptions, import_model
from embertide.trainer.publish.importer.sources import ModelImportError
from embertide.trainer.publish.importer.spec import ModelSpec, TableSpec
from embertide.trainer.publish.snapshot import read_manifest

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
SHAPE = foreign.DenseShape(dense_features=2, embedding_dim=4)
NETS = '''
"""Nets, good and bad."""
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, dense, embeddings):
        return self.layer(torch.cat([dense, embeddings], 1))

READY = Net()
NUMBER = 3

def number():
    return NUMBER

def fails():
    raise RuntimeError("no data here")

def needs(size):
    return Net()
'''


class Net(nn.Module):
    """One linear layer; `change` makes it wrong."""

    def __init__(self, change: Callable[[Tensor], Any] = lambda scores: scores) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.change = change

    def forward(self, dense: Tensor, embeddings: Tensor) -> Any:
        return self.change(self.layer(torch.cat([dense, embeddings], 1)))


class OneInput(Net):
    def forward(self, embeddings: Tensor) -> Any:  # type: ignore[override]
        return embeddings.sum(1)


class Noisy(Net):
    """Scores that no program can repeat."""

    def forward(self, dense: Tensor, embeddings: Tensor) -> Any:
        scores = super().forward(dense, embeddings)
        return scores + torch.rand_like(scores)


class Sparse(nn.Module):
    """A net without dense features, and with an index that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("columns", torch.tensor([3, 1]))

    def forward(self, dense: Tensor, embeddings: Tensor) -> Any:
        return self.layer(embeddings.index_select(1, self.get_buffer("columns")))


class Scaled(Net):
    """A constant that stands in no state_dict."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor([factor]), persistent=False)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Any:
        return super().forward(dense, embeddings) * self.get_buffer("factor")


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with nets.py, whose name no other test has."""
    name = f"nets_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(NETS)
    (tmp_path / f"{name}_broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / f"{name}_raises.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    return Path(name)


TARGETS = {
    "form": ("{}", "is not module:name"),
    "module": ("{}_other:make", "there is no module .*_other'; it is looked for in"),
    "package": ("{}.sub:make", "failed: .*is not a package|there is no module"),
    "inside": ("{}_broken:make", "importing .* failed: No module named 'nothing_of_that_name'"),
    "raises": ("{}_raises:make", "importing .* failed: ZeroDivisionError"),
    "factory": ("{}:other", "has no 'other'; it has Net, READY, fails, needs, number"),
    "not_callable": ("{}:NUMBER", "give a function that makes an nn.Module"),
    "no_module": ("{}:number", "gives a int; it must give an nn.Module"),
    "fails": ("{}:fails", r"failed: RuntimeError\('no data here'\)"),
    "arguments": ("{}:needs", "calling .* without arguments failed"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_that_gives_no_net_is_refused(nets: Path, name: str) -> None:
    target, says = TARGETS[name]
    with pytest.raises(ExportError, match=says):
        foreign.load_module(target.format(nets))


def test_a_class_a_function_or_a_net_is_a_target(nets: Path) -> None:
    for attribute in ("Net", "READY"):
        assert isinstance(foreign.load_module(f"{nets}:{attribute}"), nn.Module)


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "signature": (OneInput, r"forward\(embeddings.* does not take \(dense, embeddings\)"),
    "no_second_input": (lambda: nn.Linear(6, 1), r"forward\(input.* does not take"),
    "columns": (
        lambda: Net(lambda s: s.expand(-1, 2)),
        r"gives shape \[1, 2\] for 1 samples; it must give one score a sample",
    ),
    "summed": (lambda: Net(lambda s: s.sum()), r"gives shape \[\] for 1"),
    "batch_of_one": (lambda: Net(lambda s: s[:1]), r"gives shape \[1, 1\] for 3 samples"),
    "tuple": (lambda: Net(lambda s: (s, s)), "gives a tuple; it must give a tensor"),
    "double": (lambda: Net(lambda s: s.double()), "scores are torch.float64"),
    "nan": (lambda: Net(lambda s: s / 0), "not finite"),
    "no_parameter": (nn.Identity, "has no parameter"),
    "half": (lambda: Net().half(), "forward failed on zeros of|must be float32"),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_gives_no_scores_is_refused(tmp_path: Path, name: str) -> None:
    make, says = MODULES[name]
    with pytest.raises(ExportError, match=says):
        foreign.export_folder(make(), tmp_path / "net", SHAPE, cache=CACHE)
    assert not list(tmp_path.iterdir())


def test_wrong_widths_say_which_options_to_check(tmp_path: Path) -> None:
    shape = foreign.DenseShape(dense_features=2, embedding_dim=5)
    with pytest.raises(ExportError, match=r"zeros of \[1, 2\] and \[1, 5\].*--embedding-dim"):
        foreign.export_folder(Net(), tmp_path / "net", shape)
    for dense_features, embedding_dim in ((-1, 1), (0, 0)):
        with pytest.raises(ExportError, match="; give"):
            foreign.DenseShape(dense_features=dense_features, embedding_dim=embedding_dim)


def test_a_net_that_does_not_repeat_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"differ from the module's by .*random numbers"):
        foreign.export_folder(Noisy(), tmp_path / "net", SHAPE, cache=CACHE)
    assert not list(tmp_path.iterdir())


def test_integer_buffers_become_part_of_the_program(tmp_path: Path) -> None:
    shape = foreign.DenseShape(dense_features=0, embedding_dim=4)
    said = foreign.export_folder(Sparse(), tmp_path / "net", shape, cache=CACHE)
    assert (said["parameters"], said["max_difference"] < 1e-5) == (3, True)


def test_a_cached_program_of_another_constant_is_not_taken(tmp_path: Path) -> None:
    torch.manual_seed(1)
    for factor in (2.0, 3.0):
        said = foreign.export_folder(Scaled(factor), tmp_path / f"{factor}", SHAPE, cache=CACHE)
        assert said["max_difference"] < 1e-5


def test_weights_are_loaded_and_what_they_lack_is_named(tmp_path: Path) -> None:
    want, net = Net(), Net()
    torch.save({**want.state_dict(), "item.weight": torch.zeros(3, 2)}, tmp_path / "w.pt")
    assert foreign.load_weights(net, tmp_path / "w.pt") == ["item.weight"]
    assert torch.equal(net.layer.weight, want.layer.weight)
    safetensors.torch.save_file(want.state_dict(), tmp_path / "w.safetensors")
    assert foreign.load_weights(Net(), tmp_path / "w.safetensors") == []
    bad: dict[str, tuple[Any, str]] = {
        "lacks": ({"layer.weight": torch.zeros(1, 6)}, r"lacks layer.bias; it holds layer.weight"),
        "shape": ({**want.state_dict(), "layer.bias": torch.zeros(2)}, "does not fit"),
        "nested": ({"net": want.state_dict()}, "holds no state_dict"),
    }
    for name, (state, says) in bad.items():
        torch.save(state, tmp_path / f"{name}.pt")
        with pytest.raises(ExportError, match=says):
            foreign.load_weights(Net(), tmp_path / f"{name}.pt")
    with pytest.raises(ExportError, match=r"none.pt is missing"):
        foreign.load_weights(Net(), tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("no weights")
    with pytest.raises(ExportError, match="cannot be read as weights"):
        foreign.load_weights(Net(), tmp_path / "text.pt")


# --- the command, and the folder in an import -----------------------------------------------------


def run(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(export_command.command)
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture
def folder(nets: Path, tmp_path: Path) -> Path:
    widths = ("--dense-features", 2, "--embedding-dim", 4)
    result = run(f"{nets}:Net", tmp_path / "net", *widths, "--cache", CACHE, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["parameters"] == 7
    assert (said["cpu"], said["dense_features"], said["embedding_dim"]) == ("x86-64-v3", 2, 4)
    return tmp_path / "net"


def ranked(tmp_path: Path, dim: int = 4, dense_features: int | None = None) -> ModelSpec:
    (tmp_path / "item").mkdir(exist_ok=True)
    np.save(tmp_path / "item" / "keys.npy", np.arange(10))
    np.save(tmp_path / "item" / "vectors.npy", np.zeros((10, dim), np.float32))
    return ModelSpec(
        name="m",
        tables=(TableSpec(name="item", source=tmp_path / "item"),),
        features=(FeatureConfig(name="item", table="item"),),
        dense_features=dense_features,
    )


def test_an_import_takes_the_folder(folder: Path, tmp_path: Path) -> None:
    import_model(ranked(tmp_path), tmp_path / "out", ImportOptions(dense=folder))
    manifest: Any = read_manifest(tmp_path / "out")
    assert [each["role"] for each in manifest["dense"]] == ["program", "tensors"]
    assert (manifest["dense_features"], manifest["dense_cpu"]) == (2, "x86-64-v3")
    for name, part in (("program.pt2", "program.pt2"), ("tensors.safetensors",) * 2):
        assert (tmp_path / "out/dense" / name).read_bytes() == (folder / part).read_bytes()
    with pytest.raises(ExportError, match="net exists"):
        foreign.export_folder(Net(), folder, SHAPE)


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Any:
        return self.layer(torch.cat([dense, embeddings], 1))


def test_several_scores_have_names(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, heads=("click", "buy"))
    said = foreign.export_folder(Tasks(), tmp_path / "net", shape, cache=CACHE)
    assert said["heads"] == ["click", "buy"]
    assert said["max_difference"] < 1e-5
    import_model(ranked(tmp_path), tmp_path / "out", ImportOptions(dense=tmp_path / "net"))
    assert read_manifest(tmp_path / "out")["heads"] == ["click", "buy"]
    with pytest.raises(ExportError, match=r"it must give 2 scores a sample, \[1, 2\]"):
        foreign.export_folder(Net(), tmp_path / "one", shape)
    for heads in (("click",), ("click", "click"), ("click", ""), tuple(map(str, range(65)))):
        with pytest.raises(ExportError, match=r"heads are .*; give"):
            dataclasses.replace(SHAPE, heads=heads)


def test_an_import_refuses_a_folder_that_does_not_fit(folder: Path, tmp_path: Path) -> None:
    def expect(says: str, spec: ModelSpec, dense: Path = folder) -> None:
        with pytest.raises(ModelImportError, match=says):
            import_model(spec, tmp_path / "out", ImportOptions(dense=dense))
        assert not (tmp_path / "out").exists()

    expect(r"takes 4 embedding values, the features give 5 \(item\) = 5", ranked(tmp_path, 5))
    expect("takes 2 dense features, the model says 3", ranked(tmp_path, dense_features=3))
    expect("none: dense.json is missing", ranked(tmp_path), tmp_path / "none")
    for name in ("tensors.safetensors", "program.pt2"):
        other = tmp_path / f"other-{name}"
        shutil.copytree(folder, other)
        (other / name).write_bytes(b"something else")
        expect(f"{name}: is not the file that dense.json means", ranked(tmp_path), other)
    (other / "dense.json").write_text('{"format": 1}')
    expect("not as export-dense writes it", ranked(tmp_path), other)


def test_the_command_refuses_in_one_line(nets: Path, tmp_path: Path) -> None:
    result = run(f"{nets}:other", tmp_path / "net", "--embedding-dim", 4, "--json")
    assert result.exit_code == 1
    assert "has no 'other'" in json.loads(result.stdout)["error"]
    cpu = run(
        f"{nets}:Net", tmp_path / "net", "--embedding-dim", 4, "--dense-features", 2, "--cpu", "arm"
    )
    assert "error: cpu 'arm' is unknown; use one of x86-64-v2" in cpu.stderr


def test_what_contexts_would_gain_is_said_by_choice(
    nets: Path, folder: Path, tmp_path: Path
) -> None:
    arguments = (f"{nets}:Net", tmp_path / "same", "--dense-features", 2, "--embedding-dim", 4)
    cached = (*arguments, "--cache", CACHE)
    said = run(*cached, "--explain", "--context-embeddings", "0:3", "--json")
    assert said.exit_code == 0, said.output
    contexts = json.loads(said.stdout)["contexts"]
    assert (contexts["context_columns"], contexts["columns"]) == (3, 6)
    # --explain changes no written file. Weights are random, so only the program is compared.
    assert {each.name for each in (tmp_path / "same").iterdir()} == {
        each.name for each in folder.iterdir()
    }
    assert (tmp_path / "same/program.pt2").read_bytes() == (folder / "program.pt2").read_bytes()
    for more, message in (
        (("--explain",), "no column is the user's; name some with --context-embeddings"),
        (("--explain", "--context-dense", "1:3"), "--context-dense is '1:3'; give BEGIN:END"),
        (("--context-dense", "0:1"), "columns of the context are for --explain; add it"),
    ):
        assert message in " ".join(run(*cached, *more).stderr.split())


def test_the_help_teaches_with_an_example() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "export-dense nets:make nets/rank" in " ".join(result.output.split())
