"""Settings that a plugin's user writes as JSON: fields of `kvflow.Config` and the plugin's own, in one dict.

`Config` checks its fields, the types of a msgspec struct those of the plugin. Whatever is refused is a ConfigError that
names the place and the key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import msgspec

from kvflow import checks
from kvflow.config import Config
from kvflow.errors import ConfigError

OwnT = TypeVar("OwnT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """Where the users of an engine's plugin set fields of `kvflow.Config`, and which of those they cannot set."""

    where: str
    """Name of the place for errors, such as that of an environment variable."""
    engine: str
    """Name of the engine, for errors."""
    from_engine: Collection[str]
    """Fields of Config that follow from the engine."""
    own: Collection[str] = ()
    """Settings in the same place that are no fields of Config."""

    def check_known(self, given: Mapping[str, Any]) -> None:
        """ConfigError for a setting that nobody knows, or that follows from the engine."""
        known = {entry.name for entry in fields(Config)}.difference(self.from_engine)
        listed = ", ".join(self.from_engine)
        hint = f" ({listed} come from {self.engine})" if given.keys() & {*self.from_engine} else ""
        checks.check_known(given, known.union(self.own), where=self.where, hint=hint)

    def own_settings(self, given: Mapping[str, Any], kind: type[OwnT]) -> OwnT:
        """Return the plugin's own settings. ConfigError names the place, and what is unknown or cannot be."""
        self.check_known(given)
        try:
            return msgspec.convert({name: given[name] for name in given if name in self.own}, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.where}: {checks.refusal(error, given)}") from error

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
        ours = {name: checks.without_doubles(given[name]) for name in given if name not in self.own}
        try:
            return Config(**{**values, **ours})
        except ConfigError as error:
            if ours.keys().isdisjoint(str(error).partition(":")[0].split(", ")):
                raise
            raise ConfigError(f"{self.where}: {error}") from error
