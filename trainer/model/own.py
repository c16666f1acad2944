"""A net of the user's own: a class named by path, made, and tried before it learns.

It is called as `Class(model, **net_arguments)` and is an nn.Module, (dense_BD, embeddings_BE) ->
logits_B; `layers.Columns` says where each feature's columns lie. docs/training.md has the contract.

Shapes: B samples, D dense columns, E all embedding values of a sample.
"""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from embertide.trainer.config import ModelConfig, user_objects
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.model.export import ExportError, evaluating, named_tensors, on_cpu
from embertide.trainer.model.foreign import (
    TOLERANCE,
    DenseShape,
    can_run,
    check_module,
    largest_difference,
)
from embertide.trainer.model.layers import Columns


def own_net(config: ModelConfig) -> nn.Module:
    """Make the net, with torch's random weights, and try it.

    Raises:
        ConfigurationError: It cannot be imported or made; it does not take what it is given, or
            gives other than one finite fp32 logit a sample; or nothing in it, or before it, learns.
    """
    kind = user_objects.find(config.net_name)
    name = f"net {config.net!r}"
    try:
        net = kind(config, **config.net_arguments)
    except Exception as error:
        with_ = "".join(f", {key}={value!r}" for key, value in config.net_arguments.items())
        raise ConfigurationError(
            f"{name}: making it as (model{with_}) failed: {error!r}; it is called with the"
            " ModelConfig, and net_arguments by name"
        ) from error
    if not isinstance(net, nn.Module):
        raise ConfigurationError(f"{name} gives a {type(net).__name__}; it must be an nn.Module")
    try:
        with evaluating(net):
            check_module(net, _shape(config), outputs=config.outputs, hint=_hint(config))
        _check_tensors(net)
        _check_learning(net, _shape(config))
    except ExportError as error:
        raise ConfigurationError(f"{name}: {error}") from error
    _check_columns(name, net, config)
    return net


def check_program(served: nn.Module, program: Path, config: ModelConfig, cpu: str) -> None:
    """Compare the compiled program of a publication with the net that is served by it.

    Nothing is compared on a machine that cannot run the program.

    Raises:
        ConfigurationError: They give other scores.
    """
    if not can_run(cpu):
        return
    module = on_cpu(served)
    with evaluating(module):
        difference = largest_difference(module, program, _shape(config, cpu))
    if difference > TOLERANCE:
        raise ConfigurationError(
            f"net {config.net!r}: its scores differ from those of {program} by {difference:.2g}:"
            " its code has changed since the folder was begun, or it keeps state between calls, or"
            " draws random numbers in eval mode; bring the code back, or train in a new folder"
        )


def check_fit(config: ModelConfig, net: nn.Module, saved: dict[str, Tensor]) -> None:
    """Refuse a net whose tensors are not those of a checkpoint.

    Raises:
        ConfigurationError: Tensors are missing, new, or of another shape; it names them.
    """
    shapes = {name: list(tensor.shape) for name, tensor in net.state_dict().items()}
    before = {name: list(tensor.shape) for name, tensor in saved.items()}
    differing = [
        f"{name} was {before.get(name, 'not there')}, is {shapes.get(name, 'not there')}"
        for name in sorted({*before, *shapes})
        if before.get(name) != shapes.get(name)
    ]
    if differing:
        more = f", and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise ConfigurationError(
            f"net {config.net!r} is not the one that the checkpoint is of: tensor "
            f"{'; '.join(differing[:8])}{more}: bring that net back, or train in a new folder and"
            " keep this one"
        )


def _shape(config: ModelConfig, cpu: str = "x86-64-v3") -> DenseShape:
    return DenseShape(
        dense_features=config.dense_columns, embedding_dim=sum(config.feature_widths), cpu=cpu
    )


def _hint(config: ModelConfig) -> str:
    widths = zip((each.name for each in config.columns), config.feature_widths, strict=True)
    return (
        f"dense has {config.dense_columns} columns; embeddings have, side by side, "
        + ", ".join(f"{name} {width}" for name, width in widths)
        + ": embertide.nn.Columns(model) says where each lies"
    )


def _check_tensors(net: nn.Module) -> None:
    for name, tensor in named_tensors(net).items():
        if tensor.dtype != torch.float32:
            raise ExportError(f"tensor {name!r} is {tensor.dtype}; make it float32")
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise ExportError("it has no parameter that learns; give it one with requires_grad")
    if any(isinstance(each, LazyModuleMixin) for each in net.modules()):
        raise ExportError("it has a lazy module left that forward does not use; take it out")


def _check_learning(net: nn.Module, shape: DenseShape) -> None:
    """Try a step of a copy: a net that keeps statistics must not have any of the trial."""
    tried = copy.deepcopy(net).train()
    dense_BD, embeddings_BE = shape.inputs(4, torch.randn)
    embeddings_BE.requires_grad_()
    try:
        logits: Tensor = tried(dense_BD, embeddings_BE)
        logits.sum().backward()
    except Exception as error:
        raise ExportError(
            f"forward or backward failed in training mode on 4 random samples: {error}"
        ) from error
    if logits.dtype != torch.float32 or not bool(torch.isfinite(logits).all()):
        raise ExportError("its logits of random samples are not finite numbers of float32")
    if embeddings_BE.grad is None:
        raise ExportError("no gradient comes to the embeddings; use them in forward")


def _check_columns(name: str, net: nn.Module, config: ModelConfig) -> None:
    counted = any(table.counters is not None for table in config.tables)
    learned = any(feature.learned_default for feature in config.features)
    if (counted or learned) and not any(isinstance(each, Columns) for each in net.modules()):
        raise ConfigurationError(
            f"{name}: the model has {'counters' if counted else 'learned defaults'}, for"
            " embertide.nn.Columns: make one, self.columns = Columns(model), and begin forward with"
            " dense, embeddings = self.columns(dense, embeddings)"
        )
