"""The peer of `production`: its DLRM in Triton's Python backend on torch, the user repeated.

Runs in the backend's stub, as bench/peer.py does. A request has the user's keys with each
candidate, as a model that knows no contexts is asked: bags of all features, sample by sample. All
tables lie in one EmbeddingBag, the fastest form of bench/peer.py.

Shapes: B samples, F features, R rows a table, d values a row, N keys.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb  # type: ignore[import-not-found]
from safetensors.torch import load_file
from torch import nn

from bench.rank.production import production
from embertide.trainer.model.dlrm import Dlrm, Probability


class TritonPythonModel:
    """The model that the stub loads. One an instance, each with its own copy of the rows."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the weights: tables.npy [F,R,d] and net.safetensors."""
        parameters = json.loads(args["model_config"])["parameters"]
        directory = Path(parameters["directory"]["string_value"])
        torch.set_num_threads(1)
        rows_FRd = np.load(directory / "tables.npy")
        self._features, rows, self._dim = rows_FRd.shape
        all_rows = torch.from_numpy(rows_FRd).reshape(-1, self._dim)
        self._bag = nn.EmbeddingBag.from_pretrained(all_rows, mode="sum")
        self._first_row_F = torch.arange(self._features) * rows
        self._net = Probability(Dlrm(production())).eval()
        self._net.load_state_dict(load_file(directory / "net.safetensors"))

    def _scores(self, request: Any) -> Any:
        keys_N, lengths = (
            torch.from_numpy(pb.get_input_tensor_by_name(request, name).as_numpy().reshape(-1))
            for name in ("KEYS", "LENGTHS")
        )
        lengths = lengths.long()
        samples = len(lengths) // self._features
        rows_N = keys_N + torch.repeat_interleave(self._first_row_F.repeat(samples), lengths)
        pooled = self._bag(rows_N, torch.cumsum(lengths, 0) - lengths)
        scores_B = self._net(torch.zeros(samples, 0), pooled.reshape(samples, -1))
        return scores_B.reshape(1, -1).numpy()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the requests of one execution, one after the other: each fills the cores."""
        with torch.inference_mode():
            answers = [self._scores(request) for request in requests]
        return [pb.InferenceResponse(output_tensors=[pb.Tensor("SCORE", each)]) for each in answers]
