"""A trainer's plan of ranks from what a fleet reads: even, and refused where nothing is known."""

import pytest
from simulation import make_tables
from typer.testing import CliRunner

from embertide.server.cli import plan as command
from embertide.server.core.errors import RefusedError
from embertide.server.core.plan.ranks import FORMAT, for_ranks
from embertide.trainer.sync import plan
from embertide.v1 import control_pb2

TABLES = make_tables(user=5, item=4, day=0)


def loads(reads: dict[tuple[int, int], int], row_bytes: int = 64) -> list[control_pb2.TableReads]:
    found = []
    for table in {t for t, _ in reads}:
        buckets = 1 + max(b for t, b in reads if t == table)
        read_B = [reads.get((table, b), 0) for b in range(buckets)]
        bytes_B = [n * row_bytes for n in read_B]
        found.append(control_pb2.TableReads(table_id=table, reads=read_B, bytes_read=bytes_B))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_ranks_get_equally_much_of_skewed_reads_and_every_bucket_has_one(ranks: int) -> None:
    reads = {(0, b): 10_000 // (b + 3) for b in range(32)} | {(1, b): 700 for b in range(16)}
    made = for_ranks(TABLES, loads(reads), ranks)
    assert {name: len(owners) for name, owners in made.owners.items()} == {
        "user": 32,
        "item": 16,
        "day": 1,
    }
    of_rank = [0] * ranks
    for (t, b), n in reads.items():
        of_rank[made.owners[TABLES[t].name][b]] += n
    assert max(of_rank) * ranks / sum(of_rank) < 1.05
    assert made.unevenness == pytest.approx(max(of_rank) * ranks / sum(of_rank), abs=0.01)


def test_reads_of_all_nodes_count_and_wide_rows_cost_more() -> None:
    both = loads({(0, 0): 100, (0, 1): 100}) + loads({(0, 0): 100, (0, 1): 100})
    wide = for_ranks(TABLES, [*both, *loads({(1, 0): 100}, row_bytes=960)], 2)
    # 400 keys of 128 bytes are half of what 100 keys of 1,024 are.
    assert wide.owners["user"][0] == wide.owners["user"][1] != wide.owners["item"][0]
    assert for_ranks(TABLES, both, 2).owners["user"][:2] in ([0, 1], [1, 0])


def test_without_reads_it_is_refused() -> None:
    with pytest.raises(RefusedError, match="no node has reported reads: send requests"):
        for_ranks(TABLES, loads({(0, 0): 0}), 2)


def test_a_bucket_of_which_nothing_was_read_costs_something() -> None:
    owners = for_ranks(make_tables(user=10), loads({(0, 0): 1}), 4).owners["user"]
    assert max(owners.count(rank) for rank in range(4)) < 0.4 * len(owners)


def test_the_file_is_of_the_format_that_trainers_read() -> None:
    assert FORMAT == plan.FORMAT


def test_a_plan_by_what_steps_cost_is_searched_by_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[str]] = []

    def show_trainer(name: str, words: list[str]) -> int:
        asked.append([name, *words])
        return 2

    monkeypatch.setattr(command, "show_trainer", show_trainer)
    for line, wanted in (
        (
            "ranks 4 plan.json --search profile.json --seconds 5",
            "plan-search profile.json 4 --output plan.json --seconds 5.0",
        ),
        (
            "explain --profile profile.json --ranks 2 --plan a.json --plot a.svg --elsewhere",
            "plan-search profile.json 2 --plan a.json --plot a.svg --elsewhere",
        ),
    ):
        assert CliRunner().invoke(command.app, line.split()).exit_code == 2
        assert asked.pop() == wanted.split()
