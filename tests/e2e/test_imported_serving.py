"""A model made without Embertide, imported by the two commands and served by a real tritonserver.

There is no trainer and no Redis: plain torch and NumPy files, one snapshot, two kinds of model.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import foreign_net
import hps
import numpy as np
import pytest
import torch
import typer
from numpy.typing import NDArray
from serving import Client, beside, jagged_arrays, parameters
from typer.testing import CliRunner

from embertide.server.adapters import triton
from embertide.trainer.commands import export_dense, import_model

ROOT = Path(__file__).parents[2]
VERSION = 5
Bags = list[list[list[int]]]


@dataclasses.dataclass
class Foreign:
    """The model in torch, the keys of its tables' rows, and the snapshot made of it."""

    model: foreign_net.WholeModel
    rows: dict[str, dict[int, NDArray[np.float32]]]
    directory: Path

    def embeddings(self, bags: Bags) -> NDArray[np.float32]:
        """Columns item, seen (mean) and user; keys that no table knows are zeros."""
        dims = (foreign_net.ITEM_DIM, foreign_net.ITEM_DIM, foreign_net.USER_DIM)
        out = np.zeros((len(bags), sum(dims)), np.float32)
        for b, sample in enumerate(bags):
            at = 0
            for f, (table, dim) in enumerate(zip(("item", "item", "user"), dims, strict=True)):
                zeros = np.zeros(dim, np.float32)
                found = [self.rows[table].get(key, zeros) for key in sample[f]]
                if found:
                    total = np.sum(np.array(found, np.float64), axis=0)
                    out[b, at : at + dim] = total / (len(found) if f == 1 else 1)
                at += dim
        return out

    def scores(self, bags: Bags, dense_BD: NDArray[np.float32]) -> NDArray[np.float32]:
        with torch.no_grad():
            score = self.model.tower(
                torch.from_numpy(dense_BD), torch.from_numpy(self.embeddings(bags))
            )
        return np.asarray(score.numpy()[:, 0])


def run(*arguments: object) -> dict[str, Any]:
    app = typer.Typer()
    app.command("export-dense")(export_dense.command)
    app.command("import")(import_model.command)
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Foreign:
    directory = tmp_path_factory.mktemp("foreign")
    model = foreign_net.whole()
    rng = np.random.default_rng(9)
    rows = {}
    for name, table in (("item", model.item), ("user", model.user)):
        values = table.weight.detach().numpy()
        keys = rng.choice(1 << 40, len(values), replace=False) - (1 << 39)
        (directory / name).mkdir()
        np.save(directory / name / "keys.npy", keys)
        np.save(directory / name / "vectors.npy", values)
        rows[name] = dict(zip(keys.tolist(), values, strict=True))
    weights = directory / "model.pt"
    torch.save(model.tower.state_dict(), weights)
    exported = run(
        *("export-dense", "foreign_net:make", directory / "net", "--weights", weights),
        *("--dense-features", foreign_net.DENSE, "--embedding-dim", foreign_net.EMBEDDING_DIM),
        *("--cache", ROOT / "build" / "cache" / "dense", "--json"),
    )
    assert exported["max_difference"] < 1e-5
    imported = run(
        *("import", directory / "snapshot", "--dense", directory / "net", "--version", VERSION),
        *("--table", f"item={directory / 'item'}:item:seen/mean"),
        *("--table", f"user={directory / 'user'}", "--json"),
    )
    assert imported["dense_id"] == exported["dense_id"]
    return Foreign(model, rows, directory / "snapshot")


@dataclasses.dataclass
class Theirs:
    """Rows of a model of HPS, and the snapshot made of it."""

    rows: hps.Rows
    snapshot: Path


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    directory = tmp_path_factory.mktemp("hps")
    rows = hps.write(directory)
    run("import", "--hps", directory / "ps.json", directory / "snapshot", "--json")
    return Theirs(rows, directory / "snapshot")


@pytest.fixture(scope="module")
def server(
    foreign: Foreign, theirs: Theirs, server_options: triton.ServerOptions, tmp_path_factory: Any
) -> Iterator[triton.TritonServer]:
    directory = tmp_path_factory.mktemp("imported-triton")
    log = directory / "triton.log"
    options = beside(server_options, directory, log, ("ranking", "lookup", "hps"))
    model = triton.ModelOptions(snapshot=foreign.directory, max_batch_size=64)
    triton.write_model(directory, "ranking", model.replace(kind="ranking"))
    triton.write_model(directory, "lookup", model)
    of_hps = model.replace(snapshot=theirs.snapshot, hps_names=True)
    triton.write_model(directory, "hps", of_hps)
    with triton.TritonServer(options) as running:
        yield running
        assert running.alive(), running.log_text()


@pytest.fixture
def client(server: triton.TritonServer) -> Iterator[Client]:
    made = Client("grpc", server)
    yield made
    made.raw.close()


def some_bags(foreign: Foreign, rng: np.random.Generator, samples: int, longest: int) -> Bags:
    """Bags of 0 to `longest` keys (1 if that is 1), an eighth of them unknown."""
    known = {name: list(rows) for name, rows in foreign.rows.items()}

    def key(table: str) -> int:
        return int(rng.integers(1 << 30)) if rng.random() < 1 / 8 else int(rng.choice(known[table]))

    def bag(table: str) -> list[int]:
        count = 1 if longest == 1 else int(rng.integers(0, longest + 1))
        return [key(table) for _ in range(count)]

    return [[bag(table) for table in ("item", "item", "user")] for _ in range(samples)]


def some_dense(rng: np.random.Generator, samples: int) -> NDArray[np.float32]:
    return rng.standard_normal((samples, foreign_net.DENSE)).astype(np.float32)


def test_ranking_gives_the_scores_of_the_module(client: Client, foreign: Foreign) -> None:
    rng = np.random.default_rng(1)
    for samples in (1, 3, 64):
        bags = some_bags(foreign, rng, samples, 1)
        dense_BD = some_dense(rng, samples)
        keys = np.array(bags, np.int64)[:, :, 0]
        result = client.send({"KEYS": keys, "DENSE": dense_BD}, model="ranking")
        want = foreign.scores(bags, dense_BD)
        np.testing.assert_allclose(result.as_numpy("SCORE")[:, 0], want, rtol=0, atol=1e-6)
        assert np.all(result.as_numpy("VERSION") == VERSION)
        assert int(parameters(result)["watermark_ms"]) == 0
    assert len(np.unique(want)) > 60


def test_ranking_pools_bags_as_the_features_say(client: Client, foreign: Foreign) -> None:
    rng = np.random.default_rng(2)
    bags = some_bags(foreign, rng, 40, 5)
    dense_BD = some_dense(rng, 40)
    arrays = {**jagged_arrays(bags), "DENSE": dense_BD.reshape(1, -1)}
    result = client.send(arrays, model="ranking")
    want = foreign.scores(bags, dense_BD)
    np.testing.assert_allclose(result.as_numpy("SCORE")[0], want, rtol=0, atol=1e-6)


def test_lookup_gives_the_rows_bit_for_bit(client: Client, foreign: Foreign) -> None:
    bags = some_bags(foreign, np.random.default_rng(3), 64, 1)
    keys = np.array(bags, np.int64)[:, :, 0]
    result = client.send({"KEYS": keys}, model="lookup")
    np.testing.assert_array_equal(result.as_numpy("EMBEDDING"), foreign.embeddings(bags))


def test_a_client_of_hps_gets_the_row_of_each_key_bit_for_bit(
    client: Client, theirs: Theirs
) -> None:
    """Keys of all tables, one after the other; known, repeated and unknown ones; empty tables."""
    draw = np.random.default_rng(3)
    for counts in ((2, 52, 1), (0, 7, 0), (3, 0, 4), (1, 1, 1)):
        asked = {
            table: [next(iter(rows)), *draw.integers(-3_000, 9_000, count).tolist()][:count]
            for (table, rows), count in zip(theirs.rows.items(), counts, strict=True)
        }
        keys = np.array([[key for keys in asked.values() for key in keys]], np.int64)
        answer = client.send(
            {"KEYS": keys, "NUMKEYS": np.array([counts], np.int32)}, model="hps"
        ).as_numpy("OUTPUT0")
        expected = [hps.row_of(theirs.rows, table, key) for table in asked for key in asked[table]]
        assert answer.tobytes() == np.concatenate(expected).tobytes()


def test_a_sample_of_hps_of_too_few_tables_is_refused(client: Client, theirs: Theirs) -> None:
    with pytest.raises(Exception, match="not a multiple of the 3"):
        client.send(
            {"KEYS": np.zeros((1, 2), np.int64), "NUMKEYS": np.ones((1, 2), np.int32)}, model="hps"
        )
