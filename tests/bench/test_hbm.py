"""The report of the GPU's benchmark on its measurements."""

from typing import Any

from bench import hbm


def test_a_gpu_is_rated_by_the_bandwidth_of_a_copy() -> None:
    kernels = {f"{name}_bytes_per_s": [8.0] for name in ("pool", "gather", "lookup_and_pool")}
    kernels |= {"copy_bytes_per_s": [10.0], "lookup_keys_per_s": [5.0]}
    kernels["lookup_and_pool_keys_per_s"] = [4.0]
    store: dict[str, Any] = {"tenth_hit_share": 0.9}
    for asked in ("", "requests_", "single_keys_"):
        for tier in ("ddr", "hbm_resident", "hbm_tenth"):
            store[f"{tier}_{asked}keys_per_s"] = [2.0 if tier == "ddr" else 6.0]
    said = hbm.summary([{"kernels": kernels, "store": store}], [2.0])
    assert said["pool_share_of_copy"] == 0.8
    assert said["store_hbm_tenth_over_ddr"] == 3.0
    assert said["over_peer"] == 2.0
