"""The HBM tier as Python opens it: through the twin of a device, and without its GPU."""

import numpy as np
import pytest

from embertide import _store

HBM = 0  # a SOURCE


def store(**options: object) -> _store.ServingStore:
    layout = _store.RowLayout(chunk_dim=4)
    table = _store.TableConfig(name="item", id=0, layout=layout)
    values = np.ones(4, np.float32)
    records = b"".join(
        _store.encode_record(key, 1, 0, _store.encode_payload(layout, 1, values))
        for key in range(100)
    )
    made = _store.ServingStore(
        tables=[table],
        ddr_budget_bytes=64 << 20,
        hbm_budget_bytes=16 << 20,
        **options,  # type: ignore[arg-type]
    )
    made.stage_records(1, 0, 0, records)
    made.commit(1)
    return made


@pytest.mark.parametrize(("policy", "enter"), [("clock:2", True), ("clock:2,item=none", False)])
def test_rows_enter_a_twin_as_the_policy_says_and_are_counted(policy: str, enter: bool) -> None:
    made = store(hbm_kind="twin", hbm_devices=2, hbm_policy=policy)
    keys_N = np.arange(120)
    for _ in range(4):
        values_ND, sources_N, _ = made.lookup(0, keys_N)
        made.maintain()
    assert (values_ND[:100] == 1).all()
    assert (values_ND[100:] == 0).all()
    assert ((sources_N == HBM).sum() == 100) == enter
    stats = made.stats()
    assert len(stats["hbm"]) == 2
    assert sum(each["hits"] for each in stats["hbm"]) == stats["hits"]["hbm"]
    assert sum(each["hits"] + each["misses"] for each in stats["hbm"]) == 4 * 120
    assert sum(each["placed"] for each in stats["hbm"]) == (100 if enter else 0)
    assert all(0 < each["used_bytes"] <= each["budget_bytes"] for each in stats["hbm"])
    assert not stats["hbm_failed"]


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        ({"hbm_devices": 64}, "NOT_FOUND", "GPU"),
        ({"hbm_kind": "cpu"}, "INVALID_ARGUMENT", "use gpu or twin"),
        ({"hbm_kind": "twin", "hbm_policy": "lru"}, "INVALID_ARGUMENT", "clock:2 to clock:15"),
    ],
)
def test_what_cannot_be_is_refused_and_says_why(
    options: dict[str, object], code: str, why: str
) -> None:
    with pytest.raises(_store.StoreError, match=why) as refused:
        store(**options)
    assert refused.value.code == code
