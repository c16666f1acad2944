"""Settings of all tests: the order of files, what a test may leave, what is shown of a failure.

Workers take the files that take longest first, so that none ends alone. What a test changes of its
process is put back, or fails its file (support/left_behind.py). The end of what a failure has
written is shown.

Values that Hypothesis draws are the same in each run, whatever else the machine does;
`EMBERTIDE_RANDOM=1` draws others.
"""

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import left_behind
import pytest

# These options compile the code around a net's kernels in two thirds of the time; the kernels stay
# the same. For the processes that tests start, too.
os.environ |= {
    "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
    "AOT_INDUCTOR_ENABLE_LINE_TABLES": "0",
}

hypothesis.settings.register_profile(
    "ours",
    deadline=None,
    derandomize="EMBERTIDE_RANDOM" not in os.environ,
    database=None,
)
hypothesis.settings.load_profile("ours")

_HERE = Path(__file__).parent
_SHOWN = 10_000  # characters of each stream of a failed test
# A third of a minute and more, the longest first; `make test` gives a whole file to one worker.
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
    "e2e/test_examples.py",
    "trainer/test_nets.py",
    "e2e/test_perf_analyzer.py",
    "e2e/test_dense_plugin.py",
    "trainer/test_kafka_training.py",
    "trainer/test_live_training.py",
    "e2e/test_schema_switch.py",
    "trainer/test_import.py",
    "trainer/test_late_labels.py",
    "e2e/test_ends.py",
    "trainer/test_going_on.py",
    "trainer/test_publish_budget.py",
    "trainer/test_redis_stream.py",
    "trainer/test_replay.py",
    "trainer/test_transform_search.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by file, as above; the order within a file stays."""
    places = {_HERE / name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """Leave the process as a test found it; what fixtures of a wider scope do is theirs to undo."""
    with left_behind.process_put_back():
        yield


@pytest.fixture(autouse=True, scope="module")
def _globals_as_they_were() -> Iterator[None]:
    """Fail the last test of a file that leaves a global of ours changed.

    Not each test: to look at 8,000 names takes 14 ms.
    """
    before = left_behind.names()
    yield
    left = left_behind.changes(before, left_behind.names())
    assert not left, "tests of this file leave behind:\n" + "\n".join(left)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the end of what a failed test has written, which says why."""
    report = yield
    report.sections = [(name, _end(text)) for name, text in report.sections]
    return report


def _end(text: str) -> str:
    left_out = len(text) - _SHOWN
    return text if left_out <= 0 else f"[{left_out} characters before this]\n{text[-_SHOWN:]}"
