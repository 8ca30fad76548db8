"""Configuration from JSON: values of an engine's own configuration, checked as fields of kvflow's dataclasses.

Engines hand connectors a dict that a user has written. What it may hold follows from the fields' types; a value of
another type is a ConfigError that names its key, before anything is made of it.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from os import PathLike
from typing import Any

import msgspec

from kvflow.errors import ConfigError


def checked_fields(given: Mapping[str, Any], kind: type, *, where: str) -> dict[str, Any]:
    """The values of `given` that are fields of `kind`, each of its type. `where` names the dict in errors."""
    checked = {}
    for name, wanted in _json_types(kind).items():
        if name in given:
            try:
                checked[name] = msgspec.convert(given[name], wanted)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{where}: {name}: {error}") from error
    return checked


@lru_cache(maxsize=16)
def _json_types(kind: type) -> dict[str, Any]:
    """A dataclass's fields, with the types that JSON has for them: a path is a text."""
    return {name: _without_paths(hint) for name, hint in typing.get_type_hints(kind).items()}


def _without_paths(hint: Any) -> Any:
    if not isinstance(hint, types.UnionType):
        return hint
    kept = [member for member in typing.get_args(hint) if typing.get_origin(member) is not PathLike]
    return typing.Union[tuple(kept)]  # noqa: UP007 - there is no other way to write a union of a list
