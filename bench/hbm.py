"""The HBM tier measured against copies, the DDR tier and torch's EmbeddingBag on one GPU.

Runs the program `hbm_bench` and the peer in turns and writes medians and samples as JSON. Needs
nothing but Python; the peer is left out, and the record says so, where torch has no CUDA.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DIM = 128
BAG_KEYS = 20
# The goal, as a share of the bandwidth of a copy measured in the same run, with all rows resident.
GOAL_SHARE = 0.8


def peer_keys_per_s(rows: int, launches: int = 10) -> float:
    """Keys per second of a warm `EmbeddingBag` (sum, fp32) with as many rows on the GPU."""
    import torch

    keys = torch.randint(0, rows, (rows // BAG_KEYS * BAG_KEYS,), device="cuda")
    offsets = torch.arange(0, keys.numel(), BAG_KEYS, device="cuda")
    weight = torch.rand(rows, DIM, device="cuda")
    seconds = 0.0
    with torch.no_grad():
        for timed in (False, True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(launches):
                torch.nn.functional.embedding_bag(keys, weight, offsets, mode="sum")
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start if timed else 0.0
    return float(launches * keys.numel() / seconds)


def peer_missing() -> str:
    """Why there is no peer here; empty if there is one."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "torch sees no CUDA"


def _median(runs: list[dict[str, Any]], part: str, name: str) -> float:
    samples: list[float] = [sample for run in runs for sample in run[part][name]]
    return statistics.median(samples)


def summary(runs: list[dict[str, Any]], peer: list[float]) -> dict[str, Any]:
    """The figures that are told; `runs` are the program's records."""
    copy = _median(runs, "kernels", "copy_bytes_per_s")
    answer = {
        name: _median(runs, "kernels", name)
        for name in ("copy_bytes_per_s", "lookup_keys_per_s", "lookup_and_pool_keys_per_s")
    }
    for name in ("pool", "gather", "lookup_and_pool"):
        answer[f"{name}_share_of_copy"] = _median(runs, "kernels", f"{name}_bytes_per_s") / copy
    for asked in ("", "requests_", "single_keys_"):
        ddr = _median(runs, "store", f"ddr_{asked}keys_per_s")
        for name in ("hbm_resident", "hbm_tenth"):
            keys = _median(runs, "store", f"{name}_{asked}keys_per_s")
            answer[f"store_{name}_{asked}keys_per_s"] = keys
            answer[f"store_{name}_{asked}over_ddr"] = keys / ddr
    answer["store_tenth_hit_share"] = statistics.median(r["store"]["tenth_hit_share"] for r in runs)
    if peer:
        answer["peer_keys_per_s"] = statistics.median(peer)
        answer["over_peer"] = answer["lookup_and_pool_keys_per_s"] / answer["peer_keys_per_s"]
    return answer


def main() -> int:
    """Runs program and peer in turns; 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", choices=("gpu", "twin"), default="gpu")
    parser.add_argument("--rows", type=int, default=4 << 20, help="2 GiB of payload")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    missing = "the twin has no peer" if args.device == "twin" else peer_missing()
    runs: list[dict[str, Any]] = []
    peer: list[float] = []
    for _ in range(args.runs):
        ran = subprocess.run(
            [args.binary, args.device, str(args.rows)], capture_output=True, text=True, check=False
        )
        if ran.returncode != 0:
            print(f"hbm_bench failed: {ran.stderr.strip()}", file=sys.stderr)
            return 1
        runs.append(json.loads(ran.stdout))
        if not missing:
            peer.append(peer_keys_per_s(args.rows))
    figures = summary(runs, peer)
    record = {"summary": figures, "peer_missing": missing, "peer": peer, "runs": runs}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(figures, indent=1))
    met = figures["pool_share_of_copy"] >= GOAL_SHARE
    print(f"goal, {GOAL_SHARE:.0%} of a copy at dim {DIM}: {'met' if met else 'missed'}")
    return 0 if met or args.device == "twin" else 1


if __name__ == "__main__":
    sys.exit(main())
