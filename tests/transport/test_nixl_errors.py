"""Errors of NIXL in words: NIXL's own names mean nothing without its source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvflow.config import Config
from kvflow.errors import ConfigError
from kvflow.transport.base import PeerGone, TransportError
from kvflow.transport.nixl import native
from kvflow.transport.nixl.loop import NixlTransport
from kvflow.transport.nixl.native import import_bindings, translate_error
from tests.support.another_install import lines_of_another_install
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


OPEN_ELSEWHERE = """
import asyncio, kvflow

async def main():
    try:
        await kvflow.Runtime(kvflow.Config(engine_id="a", listen="tcp://127.0.0.1:0")).__aenter__()
    except kvflow.errors.ConfigError as error:
        print(error)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.nixl
def test_plugins_of_another_install_are_named(tmp_path: Path) -> None:
    """See `lines_of_another_install`."""
    (opened,) = lines_of_another_install(tmp_path, OPEN_ELSEWHERE)
    assert opened.startswith("nixl_backend: 'UCX' is not among NIXL's plugins []")


def test_its_own_plugins_need_no_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps, own, link = tmp_path / "maps", tmp_path / "lib" / "plugins", tmp_path / "link"
    maps.write_text(f"7f00-7f10 r-xp 00000000 fe:00 123    {tmp_path}/lib/libnixl.so\n")
    own.mkdir(parents=True)
    link.symlink_to(own)
    monkeypatch.setattr(native, "_MAPS", maps)
    for folder in ("", str(own), str(link)):
        monkeypatch.setenv("NIXL_PLUGIN_DIR", folder)
        assert native.plugin_dir_note() == ""
    monkeypatch.setenv("NIXL_PLUGIN_DIR", "/opt/other")
    assert native.plugin_dir_note().startswith("; NIXL_PLUGIN_DIR is set to '/opt/other', this NIXL's own plugins are")


@pytest.mark.nixl
async def test_a_system_that_gives_nixl_no_thread_is_an_error_of_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*_: object, **__: object) -> None:
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(native, "new_agent", no_more)
    with pytest.raises(ConfigError, match="cannot start backend 'UCX' as configured: Resource temporarily unavailable"):
        await NixlTransport(Config(engine_id="a"), "a").open()
