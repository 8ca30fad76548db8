"""Errors of NIXL's, in words: its own names say nothing to who has never read its source."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from kvflow.transport.base import PeerGone, TransportError
from kvflow.transport.nixl.native import import_bindings, translate_error
from tests.support.tests_support import each


@pytest.fixture
def bindings() -> ModuleType:
    pytest.importorskip("nixl._bindings")
    return import_bindings()


@pytest.mark.parametrize("before", [True, False])
def test_loading_nixl_leaves_logging_as_the_process_has_it(before: bool, bindings: ModuleType) -> None:
    """In another process: here it is loaded already."""
    load = f"import logging; logging.raiseExceptions = {before}; import kvflow.transport.nixl.native as native; "
    shown = "native.import_bindings(); print(logging.raiseExceptions)"
    done = subprocess.run([sys.executable, "-c", load + shown], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(before)]


def test_a_broken_connection_is_said_in_words(bindings: ModuleType) -> None:
    found = translate_error(bindings.nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT"), bindings)
    assert type(found) is PeerGone
    assert str(found) == (
        "the connection to the peer's process is broken: the process has ended or was killed, or the network has"
        " failed; NIXL and UCX report the same on stderr"
        " (NIXL: nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT)"
    )


@each("name", ["nixlBackendError", "nixlNotFoundError"])
def test_any_other_error_is_said_to_be_of_nixl(name: str, bindings: ModuleType) -> None:
    found = translate_error(getattr(bindings, name)("NIXL_ERR_WHAT"), bindings)
    assert type(found) is TransportError
    assert str(found) == f"NIXL reports an error: {name}: NIXL_ERR_WHAT"
