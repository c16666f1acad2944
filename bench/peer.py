"""The peer: DLRM, or its lookups alone, in Triton's Python backend on torch.

Runs in the backend's stub, which ignores PYTHONPATH: the `model.py` that `bench.servers` writes
sets `sys.path` and imports this.

Shapes: B samples, F features, d values a row, N keys.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb  # type: ignore[import-not-found]
from safetensors.torch import load_file
from torch import Tensor, nn

from bench.shapes import Shape
from embertide.trainer.model.dlrm import Dlrm, Probability

KEYS, LENGTHS, DENSE = "KEYS", "LENGTHS", "DENSE"


def _parameters(model_config: str) -> dict[str, str]:
    parameters = json.loads(model_config)["parameters"]
    return {name: value["string_value"] for name, value in parameters.items()}


def _array(request: Any, name: str) -> Any:
    return pb.get_input_tensor_by_name(request, name).as_numpy()


def _joined(requests: list[Any], name: str, axis: int) -> Any:
    arrays = [_array(request, name) for request in requests]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)


class TritonPythonModel:
    """The model that the stub loads. One an instance, each with its own copy of the rows."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the weights."""
        options = _parameters(args["model_config"])
        torch.set_num_threads(int(options["threads"]))
        torch.set_grad_enabled(False)
        directory = Path(options["directory"])
        self.jagged = options["jagged"] == "1"
        self.stacked = options["stacked"] == "1"
        self.net = self._load_net(directory, options) if options["kind"] == "ranking" else None
        self._load_tables(np.load(directory / "tables.npy"))

    def _load_net(self, directory: Path, options: dict[str, str]) -> nn.Module:
        net = Probability(Dlrm(Shape(**json.loads(options["shape"])).config()))
        net.load_state_dict(load_file(directory / "net.safetensors"))
        self.net_dtype = torch.bfloat16 if options["bf16"] == "1" else torch.float32
        return net.eval().to(self.net_dtype)

    def _load_tables(self, rows_FRd: Any) -> None:
        bag = nn.EmbeddingBag.from_pretrained
        self.features, rows, self.dim = rows_FRd.shape
        all_rows = torch.from_numpy(rows_FRd)
        if self.stacked:
            self.bags = [bag(all_rows.reshape(-1, self.dim), mode="sum")]
            self.first_row_F = torch.arange(self.features) * rows
        else:
            self.bags = [bag(rows_Rd, mode="sum") for rows_Rd in all_rows]

    def _rectangular(self, keys_BF: Tensor) -> Tensor:
        if self.stacked:
            rows_N = (keys_BF + self.first_row_F).reshape(-1)
            offsets = torch.arange(len(rows_N))
            flat: Tensor = self.bags[0](rows_N, offsets)
            return flat.reshape(len(keys_BF), -1)
        offsets_B = torch.arange(len(keys_BF))
        columns_FB = keys_BF.t().contiguous()
        vectors = [
            bag(keys_B, offsets_B) for bag, keys_B in zip(self.bags, columns_FB, strict=True)
        ]
        return torch.cat(vectors, 1)

    def _pooled(self, keys_N: Tensor, lengths: Tensor) -> Tensor:
        """Pool jagged bags, sample-major, from the stacked table in one call."""
        samples = len(lengths) // self.features
        rows_N = keys_N + torch.repeat_interleave(self.first_row_F.repeat(samples), lengths)
        offsets = torch.cumsum(lengths, 0) - lengths
        pooled: Tensor = self.bags[0](rows_N, offsets)
        return pooled.reshape(samples, -1)

    def _answers(self, requests: list[Any]) -> tuple[Tensor, list[int]]:
        """Return the answers of all requests, and how many samples each brought."""
        tensor, features = torch.from_numpy, self.features
        if self.jagged:
            lengths = tensor(_joined(requests, LENGTHS, 1).reshape(-1)).long()
            x_BE = self._pooled(tensor(_joined(requests, KEYS, 1).reshape(-1)), lengths)
            counts = [_array(request, LENGTHS).size // features for request in requests]
        else:
            x_BE = self._rectangular(tensor(_joined(requests, KEYS, 0)))
            counts = [len(_array(request, KEYS)) for request in requests]
        if self.net is None:
            return x_BE, counts
        dense_BD = tensor(_joined(requests, DENSE, 1 if self.jagged else 0)).reshape(len(x_BE), -1)
        scores: Tensor = self.net(dense_BD.to(self.net_dtype), x_BE.to(self.net_dtype))
        return scores.float().reshape(-1, 1), counts

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the requests of one execution, all in one pass."""
        with torch.inference_mode():
            answers, counts = self._answers(requests)
        name = "EMBEDDING" if self.net is None else "SCORE"
        parts = np.split(answers.numpy(), np.cumsum(counts)[:-1])
        shaped = (part.reshape(1, -1) if self.jagged else part for part in parts)
        return [pb.InferenceResponse(output_tensors=[pb.Tensor(name, part)]) for part in shaped]
