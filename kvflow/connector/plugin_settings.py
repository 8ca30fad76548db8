"""Checks an engine's options and the JSON settings of its plugin: fields of `kvflow.Config` and the plugin's own keys.

Each ConfigError names the option, or the place of the settings and the wrong key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvflow import checks
from kvflow.config import Config
from kvflow.errors import ConfigError

OwnT = TypeVar("OwnT", bound=msgspec.Struct)


class RefusedOption(NamedTuple):
    """An option of an engine that changes what its block ids mean, so that the engine does not start with kvflow."""

    option: str
    field: str
    """Where the engine keeps the option's value, for example "parallel.pp_size"."""
    off: object
    """Value of the field without the option."""
    reason: str


def refuse_options(refused: Iterable[RefusedOption], configs: object, *, plugin: str) -> None:
    """Raise ConfigError, with the option's name, if an engine runs with one of the `refused` options.

    `configs` is the engine's configuration; what it lacks is off. The error's message begins with `plugin`.
    """
    for option, field, off, reason in refused:
        value = configs
        for name in field.split("."):
            value = getattr(value, name, off)
        if value != off:
            raise ConfigError(f"{plugin}: {option} is {value}, supported is {off}: {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """Rules for the settings that users give to an engine's plugin: which keys are known, and who may set them."""

    where: str
    """Place where users write the settings, for error messages, for example an environment variable."""
    engine: str
    """Name of the engine, for example "vLLM", for error messages."""
    from_engine: Collection[str]
    """Fields of Config that the plugin takes from the engine, so that users cannot set them."""
    own_keys: Collection[str] = ()
    """Keys of settings that only this plugin has. All other keys must be fields of Config."""

    def check_known(self, given: Mapping[str, Any]) -> None:
        """Raise ConfigError if the user's settings `given` have an unknown key, or a key that users cannot set."""
        known = {entry.name for entry in fields(Config)}.difference(self.from_engine)
        listed = ", ".join(self.from_engine)
        hint = f" ({listed} come from {self.engine})" if given.keys() & {*self.from_engine} else ""
        checks.check_known(given, known.union(self.own_keys), where=self.where, hint=hint)

    def own_settings(self, given: Mapping[str, Any], kind: type[OwnT]) -> OwnT:
        """Return an object of the struct `kind` with the values of `own_keys` in `given`, the user's settings.

        ConfigError if a key in `given` is unknown or has a wrong type.
        """
        self.check_known(given)
        try:
            return msgspec.convert({name: given[name] for name in given if name in self.own_keys}, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.where}: {checks.refused_value_text(error, given)}") from error

    def config(self, given: Mapping[str, Any], values: Mapping[str, Any]) -> Config:
        """Return the Config for a user's settings.

        `given` has the user's settings, decoded from JSON. `values` has fields of Config: those from the engine, which
        users cannot set, and those with the plugin's defaults, which users can override. ConfigError, with the name of
        the place and the setting, if a setting is unknown, has a wrong type, or is invalid.
        """
        self.check_known(given)
        ours = {name: checks.without_doubles(given[name]) for name in given if name not in self.own_keys}
        try:
            return Config(**{**values, **ours})
        except ConfigError as error:
            if ours.keys().isdisjoint(str(error).partition(":")[0].split(", ")):
                raise
            raise ConfigError(f"{self.where}: {error}") from error
