"""The order in which workers take files: those that take longest first, so that none ends alone."""

from pathlib import Path

import pytest

_HERE = Path(__file__).parent
# Half a minute and more, the longest first; `make test` gives a whole file to one worker.
_LONGEST = (
    "trainer/test_ranks.py",
    "trainer/test_loop.py",
    "e2e/test_demo.py",
    "e2e/test_killed_moves.py",
    "trainer/test_storage.py",
    "e2e/test_net_serving.py",
    "e2e/test_killed_ranks.py",
    "control/test_killed_control_plane.py",
    "e2e/test_killed_training.py",
    "e2e/test_object_storage.py",
    "trainer/test_kafka.py",
    "e2e/test_explain.py",
    "e2e/test_following.py",
    "e2e/test_made_columns.py",
    "trainer/test_backtest.py",
    "server/test_cli.py",
    "e2e/test_killed_trainer.py",
    "trainer/test_launch.py",
    "trainer/test_rank_faults.py",
    "e2e/test_rotation.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by file, as above; the order within a file stays."""
    places = {_HERE / name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
