"""The flags of `serve` that are a node's options: made of their declaration, and read back."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from embertide._common.commands import a_name, address, one_address, with_options
from embertide.server.adapters.node_options import MIB, OPTIONS, Option
from embertide.server.adapters.process import UsageError
from embertide.v1 import options_pb2

_MS = 1000
_CALLBACKS: Mapping[int, Callable[..., Any]] = {
    options_pb2.FORMAT_NAME: a_name,
    options_pb2.FORMAT_ADDRESS: one_address,
    options_pb2.FORMAT_ADDRESSES: address,
}
# By the unit of an option: how a flag's name ends that takes a larger one, and how many it is.
_LARGER_UNITS: Mapping[int, tuple[str, int]] = {
    options_pb2.UNIT_BYTES: ("-mib", MIB),
    options_pb2.UNIT_MILLISECONDS: ("-s", _MS),
}


class NodeFlag:
    """A flag of the command line for an option of a node.

    Attributes:
        option: The option that the flag sets.
        name: The name of the command's parameter, as `ddr_mib`.
    """

    def __init__(self, option: Option) -> None:
        """Take an option that has a flag."""
        self.option = option
        self._flag = option.setting.flag
        self.name = self._flag.name.replace("-", "_")
        ending, scale = _LARGER_UNITS.get(option.setting.unit, ("", None))
        # One unit of the flag, in units of the option.
        self._scale = scale if self._flag.name.endswith(ending) else None
        self._type = float if self._scale == _MS else option.type

    def value(self, given: Any) -> Any:
        """Return the option's value for what the command line gives; None: it is not given.

        Raises:
            UsageError: It is none of the option's choices.
        """
        choices = self.option.setting.choices
        if choices and given not in choices:
            raise UsageError(f"{self.name} is {given!r}; use {_any_of(choices)}")
        if given is None or self._scale is None:
            return tuple(given or ()) if self._type is tuple else given
        return round(self._scale * given)

    @property
    def default(self) -> Any:
        """The option's value where the flag is not given; None: the node's own default."""
        return self.value(self._default) if self._flag.HasField("default") else None

    def parameter(self) -> inspect.Parameter:
        """Return the parameter of a command of typer."""
        setting = self.option.setting
        kind: Any = list[str] if self._type is tuple else self._type
        default: Any = None
        words, more = f"--{self._flag.name}", dict[str, Any]()
        if self._type is bool:
            words, default = f"{words}/--no-{self._flag.name}", False
        elif self._flag.HasField("default"):
            default = self._default
        else:
            kind |= None
            if self.option.default is not None and not setting.default_text:
                more["show_default"] = str(self._in_flag(self.option.default))
        if self._type in (int, float):
            more["min"], more["max"] = self._in_flag(setting.min), self._in_flag(setting.max)
        if self._flag.variable:
            more["envvar"] = self._flag.variable
        if callback := _CALLBACKS.get(setting.format):
            more["callback"] = callback
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, typer.Option(words, **more, help=setting.help)],
        )

    @property
    def _default(self) -> Any:
        return self._type(self._flag.default)

    def _in_flag(self, number: Any) -> Any:
        """Return an option's number in the flag's unit; of a part of a MiB, a whole one."""
        if self._scale is None:
            return number
        return -(-number // self._scale) if self._scale == MIB else number / self._scale


def _any_of(choices: Any) -> str:
    *first, last = choices
    return f"{', '.join(first)} or {last}"


FLAGS: Mapping[str, NodeFlag] = {
    flag.name: flag
    for flag in (NodeFlag(each) for each in OPTIONS.values() if each.setting.HasField("flag"))
}
"""By the name of the command's parameter."""


def with_node_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all flags of a node's options; it gets their values by name, as `flags`."""
    return with_options(command, "flags", [flag.parameter() for flag in FLAGS.values()])


def options_of(flags: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    """Return a node's options by name, without those that have no effect beside the others.

    Args:
        flags: Values of all flags, by the names of `FLAGS`.
        given: Options that are known already, in place of what flags say of them.

    Raises:
        UsageError: A value is none of an option's choices.
    """
    options = {flag.option.name: flag.value(flags[name]) for name, flag in FLAGS.items()}
    options |= given
    return {
        name: value
        for name, value in options.items()
        if not (needed := OPTIONS[name].setting.needs) or options.get(needed)
    }
