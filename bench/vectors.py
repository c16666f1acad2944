"""Kinds of vectors: AVX-512 where the CPU has it, and all sides held to AVX2.

Libraries choose their vectors when they are loaded, so a level is a process of its own. In it our
store, our plugin, torch, oneDNN, MKL and FBGEMM are told the same. (MKL uses no AVX-512 of AMD's
CPUs, whatever it is told.)
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from bench.servers import BenchError
from embertide import _store

LEVELS = ("avx512", "avx2")
TORCH = "ATEN_CPU_CAPABILITY"

_ONE_DNN = {"avx2": "AVX2", "avx512": "ALL"}


def here() -> tuple[str, ...]:
    """Return the levels that this CPU has, the widest first."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    needed = {"avx512": ("avx512f", "avx512vl", "avx512bw", "avx512dq"), "avx2": ("avx2", "f16c")}
    return tuple(level for level in LEVELS if all(f" {flag}" in flags for flag in needed[level]))


def environment(level: str) -> Mapping[str, str]:
    """Return this process's environment with what holds libraries to a level."""
    return {
        **os.environ,
        "EMBERTIDE_VECTORS": level,
        TORCH: level,
        "ONEDNN_MAX_CPU_ISA": _ONE_DNN[level],
        "MKL_ENABLE_INSTRUCTIONS": level.upper(),
        "FBGEMM_ENABLE_INSTRUCTIONS": level.upper(),
    }


def check(level: str) -> None:
    """Raise BenchError unless our store and torch have these vectors in this process."""
    had = {_store.vector_level(), torch.backends.cpu.get_cpu_capability().lower()}
    if had != {level}:
        raise BenchError(f"{level} was asked for, and the sides have {', '.join(sorted(had))}")
