"""A node's options, from their one declaration, and a model's parameters, which are made of them.

`proto/embertide/v1/options.proto` declares each with its help, unit, bounds, default and flag.
"""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from embertide.v1 import options_pb2

MIB = 1 << 20
_TYPES: Mapping[int, type] = {
    FieldDescriptor.CPPTYPE_STRING: str,
    FieldDescriptor.CPPTYPE_BOOL: bool,
    FieldDescriptor.CPPTYPE_UINT32: int,
    FieldDescriptor.CPPTYPE_UINT64: int,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """An option of a node.

    Attributes:
        name: The name of its parameter in ``config.pbtxt``.
        type: The type of its value: str, Path, bool, int, float, or tuple for a list of texts.
        default: The node's value where the parameter is not given; None: that is no constant.
        setting: The rest of its declaration.
    """

    name: str
    type: type
    default: Any
    setting: options_pb2.Setting

    def text(self, value: Any) -> str | None:
        """Return a value as ``config.pbtxt`` has it; None: the parameter is left out."""
        if value is None or value is False or value == ():
            return None
        if value is True:
            return "on"
        if self.type is Path:
            return str(Path(value).resolve())
        return ",".join(value) if self.type is tuple else str(value)


def _option(field: FieldDescriptor) -> Option:
    setting = field.GetOptions().Extensions[options_pb2.setting]
    kind = _TYPES[field.cpp_type]
    if field.is_repeated:
        kind = tuple
    elif setting.format == options_pb2.FORMAT_PATH:
        kind = Path
    default = field.default_value if field.has_default_value else None
    return Option(field.name, kind, default, setting)


OPTIONS: Mapping[str, Option] = {
    field.name: _option(field) for field in options_pb2.NodeOptions.DESCRIPTOR.fields
}
"""All options, by name, in the order of their declaration."""


class ModelOptions:
    """A model's ``config.pbtxt``: a node's options, and what Triton does with requests.

    A node's options have the names and types of `OPTIONS`, as keywords and as attributes; None
    leaves one to the node's default. Immutable.

    Attributes:
        hps_names: NUMKEYS and OUTPUT0 instead of LENGTHS and EMBEDDING.
        instances: Requests that are answered at a time; they share one copy of the rows.
        max_batch_size: Bound on the requests that Triton batches together.
        max_queue_delay_us: That a request may wait for others; None: requests are not put together.
        max_queue_size: Requests that may wait in Triton's queue, which it has only where requests
            are put together; more are refused. None: no bound.
        max_wait_ms: A request that waited so long, or as long as its own `timeout`, is refused;
            None: no bound.
        options: The node's options that are given, by name.
    """

    def __init__(
        self,
        *,
        hps_names: bool = False,
        instances: int = 1,
        max_batch_size: int = 1024,
        max_queue_delay_us: int | None = 0,
        max_queue_size: int | None = None,
        max_wait_ms: int | None = None,
        kind: str = "lookup",
        **options: Any,
    ) -> None:
        """Take options, and refuse what the backend would refuse.

        Raises:
            TypeError: There is no such option.
            ValueError: Options do not go together.
        """
        for name in options:
            if name not in OPTIONS:
                near = difflib.get_close_matches(name, OPTIONS, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise TypeError(f"a node has no option {name!r}{hint}")
        self.hps_names = hps_names
        self.instances = instances
        self.max_batch_size = max_batch_size
        self.max_queue_delay_us = max_queue_delay_us
        self.max_queue_size = max_queue_size
        self.max_wait_ms = max_wait_ms
        self.options: Mapping[str, Any] = {"kind": kind, **options}
        self._check()

    def __getattr__(self, name: str) -> Any:
        """Return a node's option; None: it is not given."""
        if name not in OPTIONS:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return self.options.get(name)

    def _check(self) -> None:
        if self.instances < 1:
            raise ValueError(f"instances is {self.instances}; it must be at least 1")
        if self.max_batch_size < 1:
            raise ValueError(f"max_batch_size is {self.max_batch_size}; it must be at least 1")
        if self.hps_names and self.kind == "ranking":
            raise ValueError(
                "hps_names goes with kind lookup (--kind lookup): HPS has no ranking models"
            )
        if self.context and self.kind != "ranking":
            raise ValueError("context goes with kind ranking: embeddings have no candidates")
        bounded = self.max_queue_size is not None or self.max_wait_ms is not None
        if bounded and self.max_queue_delay_us is None:
            raise ValueError(
                "max_queue_size and max_wait_ms need max_queue_delay_us: Triton bounds its queue "
                "only where it puts requests together; give 0"
            )
        if self.state and not (self.publication and self.peer_address):
            raise ValueError(
                "state needs a publication, and the address where peers reach the node"
            )
        share = self.max_degraded_share
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"max_degraded_share is {share}; it must be from 0 to 1")
        if self.control and not self.state:
            raise ValueError("control needs state: plans are read there")

    def replace(self, **changes: Any) -> "ModelOptions":
        """Return the same options but for some.

        Raises:
            TypeError: There is no such option.
            ValueError: Options do not go together.
        """
        mine = {name: value for name, value in vars(self).items() if name != "options"}
        return ModelOptions(**{**mine, **self.options, **changes})

    @property
    def more_heads(self) -> list[str]:
        """Heads beside the first that a ranking model has, as its schema tells."""
        told = json.loads(self.schema or "{}") if self.kind == "ranking" else {}
        return [str(head) for head in told.get("heads", [])[1:]]

    def parameters(self) -> dict[str, str]:
        """Return the parameters of the backend, as text, in the order of their declaration."""
        texts = {name: option.text(self.options.get(name)) for name, option in OPTIONS.items()}
        return {name: text for name, text in texts.items() if text is not None}
