"""Connectors by name: found lazily, refused clearly."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvflow.connector.by_name import ConnectorFactory
from kvflow.errors import ConfigError


def test_a_registered_connector_is_imported_when_it_is_asked_for() -> None:
    code = """
import sys
from kvflow.connector.by_name import ConnectorFactory
factory = ConnectorFactory()
factory.register("Deque", "wave", "open")
print("wave" in sys.modules, factory.names)
found = factory.find("Deque")
print(found is sys.modules["wave"].open)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["False ('Deque',)", "True"]


def test_a_class_from_outside_needs_no_registration() -> None:
    factory: ConnectorFactory[object] = ConnectorFactory()
    factory.register("OrderedDict", "nowhere", "Nothing")
    assert factory.find("OrderedDict", "collections").__name__ == "OrderedDict"


def test_what_cannot_be_found_is_named() -> None:
    factory: ConnectorFactory[object] = ConnectorFactory()
    factory.register("A", "kvflow.no_such_module", "A")
    factory.register("B", "collections", "NoSuchClass")
    with pytest.raises(ConfigError, match=r"'A' is registered already, as kvflow\.no_such_module\.A"):
        factory.register("A", "collections", "deque")
    with pytest.raises(ConfigError, match="'C' is not known, registered are: A, B"):
        factory.find("C")
    with pytest.raises(ConfigError, match=r"'A': cannot import kvflow\.no_such_module"):
        factory.find("A")
    with pytest.raises(ConfigError, match="'B': module collections has no NoSuchClass"):
        factory.find("B")
