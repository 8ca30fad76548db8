"""Connectors by name: a connector's module is imported when it is first asked for, not when it is registered.

Engines choose a connector by a name in their configuration, and must not import what only another engine has. A class
from outside is found by its module's path, without being registered.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Generic, TypeVar

from kvflow.errors import ConfigError

ConnectorT = TypeVar("ConnectorT")


class ConnectorFactory(Generic[ConnectorT]):
    """The connectors of one engine: names, and where their classes are."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, str]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def register(self, name: str, module_path: str, class_name: str) -> None:
        """Say where a connector's class is. ConfigError if the name is taken."""
        if name in self._places:
            raise ConfigError(f"connector {name!r} is registered already, as {'.'.join(self._places[name])}")
        self._places[name] = (module_path, class_name)

    def find(self, name: str, module_path: str | None = None) -> Callable[..., ConnectorT]:
        """The class of that name: in `module_path` if given, else as registered. ConfigError if there is none."""
        if module_path is None and name not in self._places:
            raise ConfigError(f"connector {name!r} is not known, registered are: {', '.join(self._places) or 'none'}")
        path, class_name = (module_path, name) if module_path is not None else self._places[name]
        try:
            module = importlib.import_module(path)
        except ImportError as error:
            raise ConfigError(f"connector {name!r}: cannot import {path}: {error}") from error
        try:
            found: Callable[..., ConnectorT] = getattr(module, class_name)
        except AttributeError as error:
            raise ConfigError(f"connector {name!r}: module {path} has no {class_name}") from error
        return found
