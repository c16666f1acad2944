"""The net of a model, by the name in its configuration."""

from torch import nn

from embertide.trainer.config import ModelConfig
from embertide.trainer.model.dcn import DcnV2
from embertide.trainer.model.deepfm import DeepFm
from embertide.trainer.model.dlrm import Dlrm
from embertide.trainer.model.history import HistoryNet

_NETS = {"dlrm": Dlrm, "dcn_v2": DcnV2, "deepfm": DeepFm, "history": HistoryNet}


def build_net(config: ModelConfig) -> nn.Module:
    """Return the net, (dense_BD, embeddings_BE) -> logits_B, with torch's random weights.

    Raises:
        ValueError: There is no such net, or it cannot be built over these features.
    """
    if config.net not in _NETS:
        raise ValueError(f"there is no net {config.net!r}; use one of {', '.join(_NETS)}")
    return _NETS[config.net](config)
