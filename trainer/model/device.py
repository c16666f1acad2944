"""Where the dense net is while it learns: on the CPU, or on a GPU. Rows are in the store anyway."""

import logging
import os

import torch

from embertide.trainer.config import NetDevice
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
