"""The dense net's learning rate by steps: ours in closed form, or any class of torch's kind."""

import dataclasses
import json
import math
from typing import Any

import torch

from embertide.trainer.config import ScheduleConfig, user_objects
from embertide.trainer.errors import ConfigurationError


def _warmup_cosine(config: ScheduleConfig, step: int) -> float:
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    share = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    falling = (1 + math.cos(math.pi * min(share, 1.0))) / 2
    return config.factor + (1 - config.factor) * falling


def _step(config: ScheduleConfig, step: int) -> float:
    return float(config.factor ** (step // config.steps))


_OURS = {"warmup_cosine": _warmup_cosine, "step": _step}


class Schedule:
    """The factor of a learning rate, step by step. For one thread.

    A class of torch's kind drives an optimizer of its own, whose rate begins at 1 and is the
    factor: so a run may go on with another `dense_learning_rate`.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        """Begin before the first step.

        Raises:
            ConfigurationError: The class cannot be imported or made, or keeps what JSON cannot.
        """
        self._config = config
        self._steps = 0
        self._torch: Any = None
        if config.name not in _OURS:
            self._optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
            self._torch = self._made()

    def _made(self) -> Any:
        name = user_objects.name_of("schedule", self._config.name)
        kind, what = user_objects.find(name), f"schedule {name!r}"
        try:
            made = kind(self._optimizer, **self._config.arguments)
            json.dumps(made.state_dict())
        except Exception as error:
            raise ConfigurationError(
                f"{what}: making it with {dict(self._config.arguments)} failed: {error!r}; it is"
                " called as torch.optim.lr_scheduler's classes are, and its step takes nothing"
            ) from error
        return made

    @property
    def factor(self) -> float:
        """The factor of the next step's rate."""
        if self._torch is None:
            return _OURS[str(self._config.name)](self._config, self._steps)
        return float(self._optimizer.param_groups[0]["lr"])

    def step(self) -> None:
        """Say that a step was taken."""
        self._steps += 1
        if self._torch is not None:
            self._optimizer.step()
            self._torch.step()

    def state(self) -> dict[str, Any]:
        """Return what `load` goes on from, as JSON can hold it."""
        state = {"config": dataclasses.asdict(self._config), "steps": self._steps}
        if self._torch is not None:
            state |= {"torch": self._torch.state_dict(), "factor": self.factor}
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`; if it is of other settings, from as many steps by these."""
        if self._torch is not None and state["config"] == dataclasses.asdict(self._config):
            self._torch.load_state_dict(state["torch"])
            self._optimizer.param_groups[0]["lr"] = state["factor"]
            self._steps = state["steps"]
            return
        while self._torch is not None and self._steps < state["steps"]:
            self.step()
        self._steps = state["steps"]
