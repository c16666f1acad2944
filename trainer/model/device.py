"""Where the dense net is while it learns: on the CPU, or on a GPU. Rows are in the store anyway."""

import logging
import os

import torch

from embertide.trainer.config import NetDevice, NetDtype
from embertide.trainer.errors import ConfigurationError

log = logging.getLogger(__name__)

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def net_device(setting: NetDevice, local_rank: int | None = None) -> torch.device:
    """Return the device that `RunConfig.net_device` means on this machine.

    On a GPU, torch is told to refuse what does not repeat bit for bit. That holds for the process.

    Args:
        setting: "cpu", "cuda", or "auto": a GPU if torch has one.
        local_rank: This rank's number on its machine, by torchrun; ranks share the machine's GPUs
            in turn. None: what LOCAL_RANK says.

    Raises:
        ConfigurationError: "cuda", and torch has none.
    """
    gpus = torch.cuda.device_count() if setting != "cpu" and torch.cuda.is_available() else 0
    if gpus == 0:
        if setting == "cuda":
            built = torch.version.cuda or "no CUDA"
            raise ConfigurationError(
                f"net_device is 'cuda', and torch {torch.__version__}, built for {built}, finds no "
                "GPU: install a torch with CUDA and its driver, or use net_device 'cpu' or 'auto'"
            )
        return torch.device("cpu")
    if local_rank is None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    os.environ.setdefault(_CUBLAS, ":4096:8")  # else its sums depend on what ran before
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", local_rank % gpus)
    log.info("the net learns on %s, %s", device, torch.cuda.get_device_name(device))
    return device


def check_dtype(dtype: NetDtype, device: torch.device) -> None:
    """Refuse bf16 where this machine's CPU would have to emulate it, unless it is asked to.

    There a step of the net takes some twenty times as long as in fp32 (docs/results/training.md).

    Raises:
        ConfigurationError: "bf16", on a CPU without AMX and AVX-512 BF16.
    """
    able = (torch.cpu._is_amx_tile_supported, torch.cpu._is_avx512_bf16_supported)
    if dtype == "fp32" or device.type != "cpu" or any(each() for each in able):
        return
    lack = (
        "this CPU has neither AMX nor AVX-512 BF16 and emulates bf16, many times slower than fp32"
    )
    if dtype == "bf16":
        raise ConfigurationError(
            f"net_dtype is 'bf16', and {lack}: use 'fp32', or 'bf16_emulated' to learn so anyway"
        )
    log.warning("net_dtype is %r: %s", dtype, lack)
