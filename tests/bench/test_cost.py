"""Instructions by stage, from what callgrind_annotate prints."""

import pytest

from bench.servers import BenchError
from bench.store.cost import by_stage

_SAID = """
462,691,571 (100.0%)  PROGRAM TOTALS

Ir                    file:function

60,920,614 (13.17%)  store/part_worker.cc:void PartWorker::DescendBy<(Optimizer)0>(Row) [a]
25,943,504 ( 5.61%)  store/prefetch.h:PartWorker::AskForRow(RowPool const&) [a]
16,919,899 ( 3.66%)  ./sysdeps/memset-vec-unaligned-erms.S:__memset_avx2_unaligned_erms [b]
    74,114 ( 4.01%)  store/part_worker.cc:PartWorker::AskForRow(RowPool const&)
"""


def test_functions_are_counted_by_stage_and_none_is_lost() -> None:
    stages = {r"AskFor": "asked for", r"Descend|AskForRow": "step", r"Nothing": "never"}
    assert by_stage(_SAID, stages) == {
        "asked for": 25_943_504 + 74_114,
        "step": 60_920_614,
        "never": 0,
        "all else": 16_919_899,
    }


def test_what_is_no_table_of_functions_is_refused() -> None:
    with pytest.raises(BenchError, match="printed no function"):
        by_stage("462,691,571 (100.0%)  PROGRAM TOTALS\n", {"a": "b"})
