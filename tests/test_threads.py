"""A system that starts no further thread: errors that name the limit, and nothing that hangs or stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from pairs import open_pair
from side_channels import asking, to

from kvflow import Config, LeaseOutcome, Runtime, ServeRequest, blocking
from kvflow.core.policy.events import DeviceEvent
from kvflow.errors import ConfigError, PeerUnreachable, StorageFailed, TransferFailed
from kvflow.runtime.channel.keyring import make_key_files
from kvflow.runtime.copy_thread import CopyThread
from kvflow.storage import Storage
from kvflow.testing import assert_closed
from tests.support.storing import storing
from tests.support.tests_support import PATIENT, WAIT_S, small_cache

PLAIN = replace(PATIENT, engine_id="engine", listen="tcp://127.0.0.1:0", transport="inproc")
LIMIT = r"starts no further thread \(can't start new thread\): raise `ulimit -u`, or the pids limit"


class Never:
    """A device event that does not happen."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("nobody blocks")


EVENT: DeviceEvent = Never()


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """In this context the system starts no thread."""

    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_more)
            yield

    return context


def with_keys(folder: Path) -> Config:
    secret, _ = make_key_files(folder, "engine")
    return replace(PLAIN, curve_secret_key_file=secret, curve_peers_dir=folder)


@pytest.mark.parametrize(
    "config_in",
    [
        pytest.param(lambda _: replace(PLAIN, transport="nixl"), marks=pytest.mark.nixl, id="agents"),
        pytest.param(with_keys, id="keys"),
        pytest.param(lambda _: replace(PLAIN, listen="tcp://localhost:0"), id="listen"),
        pytest.param(
            lambda _: replace(PLAIN, listen="tcp://0.0.0.0:0", advertise_host="auto:localhost"), id="own host"
        ),
    ],
)
async def test_a_runtime_that_cannot_start_a_thread_does_not_open(
    config_in: Callable[[Path], Config], no_threads: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    config = config_in(tmp_path)
    failed = Runtime(config)
    with no_threads(), pytest.raises(ConfigError, match=LIMIT):
        await failed.__aenter__()
    assert_closed(failed.statistics())
    async with Runtime(config):
        pass


def test_a_blocking_runtime_opens_once_there_are_threads(
    no_threads: Callable[[], AbstractContextManager[None]],
) -> None:
    runtime = blocking.Runtime(PLAIN)
    with no_threads(), pytest.raises(ConfigError, match=f"kvflow-loop engine: the system {LIMIT}"):
        runtime.open()
    with runtime:
        pass


@pytest.mark.parametrize("staging", ["always", "never"])
async def test_a_registration_that_cannot_start_a_thread_fails(
    staging: str, no_threads: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    """The copy thread for host buffers, or the store's."""
    parts = [] if staging == "always" else [Storage(tmp_path)]
    kv_caches, layout = small_cache()
    async with Runtime(replace(PLAIN, staging=staging), parts=parts) as runtime:
        with no_threads(), pytest.raises(ConfigError, match=LIMIT):
            await runtime.register_kv_caches(kv_caches, layout)
        await runtime.register_kv_caches(kv_caches, layout)
        with no_threads():
            await runtime.unregister()
    assert_closed(runtime.statistics())


async def test_loads_and_leases_that_need_the_copy_thread_fail(
    no_threads: Callable[[], AbstractContextManager[None]],
) -> None:
    async with open_pair() as pair:
        lease = pair.offer([1])
        with no_threads():
            with pytest.raises(TransferFailed, match=f"`after` failed: .*{LIMIT}"):
                await pair.reader.load_blocks(replace(pair.wanted(lease, [4]), after=EVENT))
            computing = pair.writer.serve_blocks(ServeRequest("computing", [2], num_tokens=4, ready=EVENT))
            assert await computing is LeaseOutcome.FAILED
        await pair.reader.load_blocks(pair.wanted(lease, [4]))
        with no_threads():  # no copy has run: there is no thread to ask
            await pair.reader.unregister()


async def test_a_watch_that_was_dropped_is_not_told(no_threads: Callable[[], AbstractContextManager[None]]) -> None:
    thread = CopyThread("kvflow-copy test")
    told: list[BaseException | None] = []
    with no_threads():
        thread.watch(EVENT, told.append).dropped = True
        thread.submit(lambda: None, told.append)
    assert not told
    await asyncio.sleep(0)
    assert [type(error) for error in told] == [ConfigError]
    assert await thread.aclose(WAIT_S)


async def test_a_save_that_needs_the_copy_thread_fails(
    no_threads: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    async with storing(tmp_path) as engine:
        with no_threads(), pytest.raises(StorageFailed, match=LIMIT):
            await engine.save("key")
        assert engine.files == []
        await engine.save("key")


async def test_a_name_that_cannot_be_looked_up_is_of_a_peer_that_cannot_be_reached(
    no_threads: Callable[[], AbstractContextManager[None]],
) -> None:
    with asking() as channel, no_threads(), pytest.raises(PeerUnreachable, match=f"node-7: the system {LIMIT}"):
        await channel.ask(to("tcp://node-7:1234"), fingerprint=b"")
