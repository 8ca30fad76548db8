"""Commands whose help shows flags as what they are: typer 0.29 shows the type of a flag, `--version <bool>`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class PlainTyper(typer.Typer):
    """Class of such commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_PlainGroup, **options)

    def command(self, *arguments: Any, **options: Any) -> Callable[[FunctionT], FunctionT]:
        return super().command(*arguments, cls=_Command, **options)


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        return _plain(super().get_params(ctx))


class _PlainGroup(TyperGroup):
    def get_params(self, ctx: Any) -> Any:
        return _plain(super().get_params(ctx))


def _plain(parameters: Any) -> Any:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters
