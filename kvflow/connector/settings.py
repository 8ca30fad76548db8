"""Configuration from JSON: what a plugin's user sets, checked as fields of kvflow's dataclasses; classes by name.

Engines hand connectors a dict that a user has written. The fields' types say what it may hold; a value of another type
is a ConfigError that names its key, before anything is made of it.
"""

from __future__ import annotations

import importlib
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from os import PathLike
from typing import Any

import msgspec

from kvflow.checks import check_known, refusal
from kvflow.config import Config
from kvflow.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """Where the users of an engine's plugin set fields of `kvflow.Config`, and which of those they cannot set."""

    where: str
    """Name of the place for errors, such as that of an environment variable."""
    engine: str
    """Name of the engine, for errors."""
    from_engine: Collection[str]
    """Fields of Config that follow from the engine."""
    others: Collection[str] = ()
    """PluginSettings in the same place that are no fields of Config."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of Config that a user can set."""
        return tuple(entry.name for entry in fields(Config) if entry.name not in self.from_engine)

    def check_known(self, given: Mapping[str, Any]) -> None:
        """ConfigError for a setting that nobody knows, or that follows from the engine."""
        listed = ", ".join(self.from_engine)
        hint = f" ({listed} come from {self.engine})" if given.keys() & {*self.from_engine} else ""
        check_known(given, (*self.fields, *self.others), where=self.where, hint=hint)

    def config(self, given: Mapping[str, Any], values: Mapping[str, Any]) -> Config:
        """Return the Config that a user's settings make.

        Args:
            given: the user's settings, as JSON has them.
            values: fields of Config that follow from the engine, and defaults of the plugin.

        Returns:
            The Config; a setting goes before a default.

        Raises:
            ConfigError: names the place and the setting that is unknown, of another type, or cannot be.
        """
        self.check_known(given)
        checked = checked_fields({name: given[name] for name in given if name in self.fields}, Config, where=self.where)
        try:
            return Config(**{**values, **checked})
        except ConfigError as error:
            named = str(error).partition(":")[0].split(", ")
            if checked.keys().isdisjoint(named):
                raise
            raise ConfigError(f"{self.where}: {error}") from error


def checked_fields(given: Mapping[str, Any], kind: type, *, where: str) -> dict[str, Any]:
    """The values of `given` that are fields of `kind`, each of its type. `where` names the dict in errors.

    Keys that are no fields are left alone, but for those of a field that is a dataclass itself: its dict has no others.
    """
    return {
        name: _checked(given[name], wanted, f"{where}: {name}")
        for name, wanted in _json_types(kind).items()
        if name in given
    }


def _checked(value: Any, wanted: Any, where: str) -> Any:
    of = typing.get_args(wanted)[0] if typing.get_origin(wanted) is tuple else None
    if isinstance(of, type) and is_dataclass(of) and isinstance(value, list | tuple):
        return tuple(_checked(one, of, f"{where}: {nth}") for nth, one in enumerate(value))
    nested = isinstance(wanted, type) and is_dataclass(wanted)
    try:
        given = msgspec.convert(value, dict[str, Any] if nested else wanted)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {refusal(error, value)}") from error
    if not nested:
        return given
    check_known(given, _json_types(wanted), where=where)
    plain = checked_fields(given, wanted, where=where)
    try:
        return wanted(**plain)
    except (TypeError, ConfigError) as error:  # a field without a default; a value that cannot be
        raise ConfigError(f"{where}: {error}") from error


@lru_cache(maxsize=16)
def _json_types(kind: type) -> dict[str, Any]:
    """A dataclass's fields, with the types that JSON has for them: a path is a text."""
    return {name: _without_paths(hint) for name, hint in typing.get_type_hints(kind).items()}


def _without_paths(hint: Any) -> Any:
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint
    kept = [member for member in typing.get_args(hint) if typing.get_origin(member) is not PathLike]
    return typing.Union[tuple(kept)]  # noqa: UP007 - there is no other way to write a union of a list


def load_connector(name: str, module_path: str) -> Callable[..., Any]:
    """The class of that name in a module, which is imported now: engines do not import what only others have.

    Raises:
        ConfigError: there is no such module, or no such class in it.
    """
    try:
        module = importlib.import_module(module_path)
        found: Callable[..., Any] = getattr(module, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"connector {name!r}: not found in module {module_path}: {error}") from error
    return found
