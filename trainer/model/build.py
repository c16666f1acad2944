"""The net of a model, by the name in its configuration."""

from torch import nn

from embertide.trainer.config import ModelConfig
from embertide.trainer.model.dcn import DcnV2
from embertide.trainer.model.deepfm import DeepFm
from embertide.trainer.model.dlrm import Dlrm
from embertide.trainer.model.history import HistoryNet
from embertide.trainer.model.hstu import HstuNet
from embertide.trainer.model.own import own_net

_NETS = {
    "dlrm": Dlrm,
    "dcn_v2": DcnV2,
    "deepfm": DeepFm,
    "history": HistoryNet,
    "hstu": HstuNet,
}


def build_net(config: ModelConfig) -> nn.Module:
    """Return the net, (dense_BD, embeddings_BE) -> logits_B, with torch's random weights.

    Raises:
        ValueError: It cannot be built over these features.
        ConfigurationError: One of the user's is not what it should be.
    """
    if config.is_own_net:
        return own_net(config)
    return _NETS[config.net_name](config)
