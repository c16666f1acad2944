"""Flags in help: `--dry-run`, and not `--dry-run <bool>`, which typer prints of itself."""

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        return _bare(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> Any:
        return _bare(super().get_params(ctx))


def show_flags(app: typer.Typer) -> None:
    """Have the flags of all commands of an app be shown without a type."""
    app.info.cls = _Group
    for command in app.registered_commands:
        command.cls = _Command
    for group in app.registered_groups:
        group.cls = _Group
        if group.typer_instance is not None:
            show_flags(group.typer_instance)


def _bare(params: list[Any]) -> list[Any]:
    for each in params:
        if isinstance(each, TyperOption) and each.is_flag and each.metavar is None:
            each.metavar = ""
    return params
