"""Each part can be deleted: its folder, its tests and its row in the list of public modules, and the core works."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recording_devices import HND, NHD, RecordingEngines, handed_over
from tests_support import PATIENT, WAIT_S, limited, small_cache

from kvflow import Config, LeaseOutcome, LoadRequest, Part, Runtime, RuntimeState, ServeRequest, Ticket, parts
from kvflow.errors import ConfigError, PeerRefused, RequestError, RuntimeBroken
from kvflow.runtime.part import Ending
from kvflow.runtime.statistics import PartStatistics
from kvflow.storage import SaveRequest, Storage
from kvflow.testing import inproc_pair
from kvflow.transport.device.cache_device import CacheDevice

ROOT = Path(__file__).parents[1]
PARTS = ("failover", "growing", "prefix", "staging", "stock", "storage", "verify")
RUNTIME = ("tests/runtime/test_lifecycle.py", "tests/runtime/test_ownership.py")
CORE = ("tests/core", "tests/transport", *RUNTIME)

WITHOUT_INSTALLED = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
"""
"""Hides installed packages, which would otherwise be found in place of deleted folders."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package and its tests, without generated files."""
    unwanted = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("kvflow", "tests", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_INSTALLED)
    return tmp_path


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("without", [*((part,) for part in PARTS), PARTS], ids=[*PARTS, "any"])
def test_the_core_works_without_a_part(copy: Path, without: tuple[str, ...]) -> None:
    """Thorough: see `test_imports_point_to_the_inner_rings` of `test_house.py`."""
    names, table = copy / "kvflow" / "__init__.py", copy / "kvflow" / "parts.py"
    for part in without:
        shutil.rmtree(copy / "kvflow" / part)
        shutil.rmtree(copy / "tests" / part)
        names.write_text(re.sub(rf'\n    "kvflow\.{part}[\w.]*",', "", names.read_text("utf-8")))
        table.write_text(re.sub(rf'\n    "{part}": .*', "", table.read_text("utf-8")))
    looked_for = [f"u.find_spec('kvflow.{part}')" for part in without]
    engines = "kvflow.blocking, kvflow.connector.scheduler, kvflow.connector.worker, kvflow.ray"
    said = run(copy, "-c", f"import {engines}, importlib.util as u; print(kvflow.__file__, {', '.join(looked_for)})")
    assert said.split() == [str(names), *["None"] * len(without)]
    # Properties of pure code, which imports no part, are tried with all parts.
    tests = ("-m", "not budget", *CORE) if without == PARTS else ("-m", "not nixl", *RUNTIME)
    run(copy, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests)
    if without == PARTS:
        run(copy, "-m", "kvflow.cli.main", "selftest")


def test_a_part_that_is_gone_is_named_and_one_that_is_broken_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvflow_broken_part.py").write_text("import kvflow_of_nowhere")
    (tmp_path / "kvflow_needy_part.py").write_text("import kvflow.needed.module")
    monkeypatch.syspath_prepend(tmp_path)
    names = {"gone": "kvflow.gone.module", "broken": "kvflow_broken_part", "needy": "kvflow_needy_part"}
    monkeypatch.setattr(parts, "PARTS", names)
    with pytest.raises(ModuleNotFoundError, match="kvflow_of_nowhere"):
        parts.import_part("broken", "request 'req'")
    for name, missing in (("gone", "gone"), ("unknown", "unknown"), ("needy", "needed")):
        with pytest.raises(RequestError, match=f"^request 'req' needs kvflow.{missing}, which is not installed$"):
            parts.import_part(name, "request 'req'")


@pytest.mark.parametrize("again", [False, True])
async def test_a_load_of_one_ticket_needs_no_failover(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    """Nor one of a list of one. What needs it says so, and its blocks and leases are as they were."""

    async def elsewhere(_: object) -> None:
        return None

    monkeypatch.setattr(parts, "PARTS", {})
    async with inproc_pair() as pair:
        one, two = pair.offer([3], "one"), pair.offer([3], "two")
        load = pair.consumer.runtime.load_blocks
        tickets = [one.ticket] if again else [one.ticket, two.ticket]
        with pytest.raises(RequestError, match=r"^request .req.: a load of several .* needs kvflow\.failover"):
            await load(LoadRequest("req", tickets, [0], again=elsewhere if again else None))
        for ticket in (one.ticket, [two.ticket]):
            await load(LoadRequest("req", ticket, [0]))
        assert [await one, await two] == [LeaseOutcome.READ] * 2


async def test_a_load_that_is_verified_needs_verify_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PARTS", {})
    async with inproc_pair() as pair:
        lease, load = pair.offer([3]), pair.consumer.runtime.load_blocks
        with pytest.raises(RequestError, match=r"^request .req.: verify needs kvflow\.verify, which is not installed$"):
            await load(LoadRequest("req", lease.ticket, [0], verify=True))
        assert not (await load(LoadRequest("req", lease.ticket, [0]))).verified


async def test_a_producer_without_verify_refuses_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    async with inproc_pair() as pair:
        lease, consumer = pair.offer([3]), pair.consumer.runtime
        consumer._supervisor.require_host().optional.verify("the reader has it")
        monkeypatch.setattr(parts, "PARTS", {})
        with pytest.raises(PeerRefused, match=r"a question of kind 'get_digests' needs kvflow\.verify"):
            await consumer.load_blocks(LoadRequest("req", lease.ticket, [0], verify=True))


async def test_a_share_that_is_verified_needs_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so at the registration, before any load is drawn."""
    monkeypatch.setattr(parts, "PARTS", {})
    with pytest.raises(ConfigError, match=r"^Config\.verify_share needs kvflow\.verify, which is not installed$"):
        async with inproc_pair(config=Config(engine_id="any", verify_share=1.0)):
            pass


async def test_a_cache_that_peers_cannot_read_needs_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PARTS", {})
    needs = r"^a cache on 'cpu', with Config\.staging 'always', needs kvflow\.staging, which is not installed$"
    with pytest.raises(ConfigError, match=needs):
        async with inproc_pair(config=Config(engine_id="any", staging="always")):
            pass


@pytest.mark.parametrize(("part", "scratch"), [("staging", "auto"), ("growing", "auto"), ("staging", "always")])
async def test_small_pieces_are_read_one_by_one_without_staging(
    monkeypatch: pytest.MonkeyPatch, part: str, scratch: Any
) -> None:
    """Unless they must not be. What reads through buffers has growing's spans."""
    monkeypatch.delitem(parts.PARTS, part)
    opened = RecordingEngines()
    opened.device = CacheDevice  # type: ignore[method-assign,assignment]
    async with opened.engine("p", NHD) as producer, opened.engine("c", HND, scratch=scratch) as consumer:
        if scratch == "auto":
            await handed_over(producer, consumer)
        else:
            lease = producer.runtime.serve_blocks(ServeRequest("req", [1], num_tokens=4))
            with pytest.raises(RequestError, match=r"^request .req.: a load through buffers needs kvflow\.staging"):
                await consumer.runtime.load_blocks(LoadRequest("req", lease.ticket, [3]))
            lease.revoke()


async def test_a_lease_that_grows_and_a_load_of_one_need_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused call has taken nothing."""
    needs = r"^request .req.: a {} needs kvflow\.growing, which is not installed$"
    async with inproc_pair() as pair:
        producer, consumer = pair.producer.runtime, pair.consumer.runtime
        grows = ServeRequest("req", [3], num_tokens=4, computed_tokens=0)
        lease = producer.serve_blocks(grows)
        monkeypatch.setattr(parts, "PARTS", {})
        with pytest.raises(RequestError, match=needs.format("load of a lease that grows")):
            await consumer.load_blocks(LoadRequest("req", lease.ticket, [0]))
        rendezvous = Ticket.rendezvous(producer.introduce(), "later")
        with pytest.raises(RequestError, match=needs.format("load with a pending ticket")):
            await consumer.load_blocks(LoadRequest("req", rendezvous, [0]))
        lease.revoke()
        await lease
        producer._supervisor.require_host().serving._growth = None
        for request in (grows, ServeRequest("req", [3], num_tokens=4, payload=True)):
            with pytest.raises(RequestError, match=needs.format("lease that grows")):
                producer.serve_blocks(request)
        whole = pair.offer([3])
        await consumer.load_blocks(LoadRequest("req", whole.ticket, [0]))
        assert await whole is LeaseOutcome.READ


class Failing(Part):
    """A user's own part, which fails in the methods of a list."""

    name = "failing"

    def __init__(self, *methods: str, hangs: bool = False) -> None:
        self._methods, self._hangs = methods, hangs

    def end(self, why: Ending, wait_s: float = 0.0) -> None:
        if "end" in self._methods:
            raise KeyError("end")

    async def _fail(self, method: str) -> None:
        if method in self._methods and self._hangs:
            await asyncio.Event().wait()
        elif method in self._methods:
            raise KeyError(method)

    async def drained(self) -> None:
        await self._fail("drained")

    async def release(self, timeout_s: float) -> str:
        await self._fail("release")
        return ""

    @property
    def statistics(self) -> PartStatistics | None:
        if "statistics" in self._methods:
            raise KeyError("statistics")
        return None


@pytest.mark.parametrize("verb", ["unregister", "aclose"])
@pytest.mark.parametrize("method", ["end", "drained", "release", "statistics", "release hangs", "drained hangs"])
async def test_a_part_that_fails_does_not_keep_the_others_from_their_end(
    method: str, verb: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Only a release that hangs waits for the bound; the other part has it, too, for its own release on a slow host.
    limits = limited(PATIENT, transport_close_timeout_s=1.0 if method == "release hangs" else WAIT_S).limits
    config = replace(PATIENT, transport="inproc", listen="tcp://127.0.0.1:0", limits=limits)
    config = replace(config, drain_timeout_s=0.05, cancel_grace_s=0.05)
    name, _, hangs = method.partition(" ")
    behind = Storage(tmp_path)
    runtime = Runtime(config, parts=[Failing(name, hangs=bool(hangs)), behind])
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(runtime)
        kv_caches, layout = small_cache()
        await runtime.register_kv_caches(kv_caches, layout)
        await behind.save(SaveRequest("save", "key", [1], 4))
        if method in ("drained hangs", "statistics"):  # its `release` says that all is well
            await getattr(runtime, verb)()
        else:
            why = "not done in time" if hangs else "KeyError"
            with pytest.raises(RuntimeBroken, match=rf"{name} of part 'failing': .*{why}"):
                await getattr(runtime, verb)()
        async with Runtime(replace(config, engine_id="next"), parts=[Storage(tmp_path)]) as following:
            await following.register_kv_caches(kv_caches, layout)
        stack.pop_all()
        with contextlib.suppress(RuntimeBroken):
            await runtime.aclose()
    assert runtime.state is RuntimeState.CLOSED
    assert caplog.text.count(f"part failing: {name} failed") == (method != "drained hangs")


@pytest.mark.parametrize("name", [None, "", 7, "two words", "x" * 65])
def test_a_part_has_a_name(name: Any) -> None:
    part = Failing()
    part.name = name
    with pytest.raises(ConfigError, match=r"^parts\[0\]\.name: expected"):
        Runtime(Config(engine_id="any"), parts=[part])
    with pytest.raises(ConfigError, match=r"^parts\[0\]\.name: expected"):
        Runtime(Config(engine_id="any"), parts=[Part()])


class Bringing(Part):
    """A part that brings kvflow's own handshakes or resolver, as one for other peers would bring its own."""

    def __init__(self, name: str, brings: str) -> None:
        self.name, self._brings = name, brings

    def handshakes(self, context: Any, transport: Any, own: Any) -> Any:
        return own if self._brings == "handshakes" else None

    def resolver(self, context: Any, peers: Any, own: Any) -> Any:
        return own if self._brings == "resolver" else None


@pytest.mark.parametrize("brings", ["handshakes", "resolver"])
async def test_two_parts_that_bring_the_same_are_refused(brings: str) -> None:
    """The one that came last used to win in silence, so that the other's peers were unknown."""
    config = replace(PATIENT, transport="inproc", listen="tcp://127.0.0.1:0")
    kv_caches, layout = small_cache()
    other = "resolver" if brings == "handshakes" else "handshakes"
    async with Runtime(config, parts=[Bringing("one", brings), Bringing("both", other)]) as runtime:
        await runtime.register_kv_caches(kv_caches, layout)
    async with Runtime(config, parts=[Bringing("one", brings), Bringing("two", brings)]) as runtime:
        with pytest.raises(ConfigError, match=f"parts: 'one' and 'two' both bring {brings}: expected at most one"):
            await runtime.register_kv_caches(kv_caches, layout)


@pytest.mark.parametrize("staging", ["always", "never"])
async def test_a_load_from_a_staged_producer_needs_growing(monkeypatch: pytest.MonkeyPatch, staging: Any) -> None:
    async with inproc_pair(config=Config(engine_id="any", staging=staging, drain_timeout_s=0.1)) as pair:
        lease = pair.offer([3])
        monkeypatch.delitem(parts.PARTS, "growing")
        if staging == "never":
            await pair.consumer.runtime.load_blocks(LoadRequest("req", lease.ticket, [0]))
            return
        with pytest.raises(RequestError, match=r"a load of a lease that grows needs kvflow\.growing"):
            await pair.consumer.runtime.load_blocks(LoadRequest("req", lease.ticket, [0]))
        lease.revoke()


def run(folder: Path, *command: str) -> str:
    """Run a command that must succeed. Return its output."""
    environment = {"PYTHONPATH": f"{folder}:{folder / 'examples'}", "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
