"""The one typed border: whatever is passed to whatever is public is right, or an InvalidInput that names it.

What is public is found by looking, and so are the fields of what can be passed: a new verb or field fails here until
it says what it takes. What is refused changes nothing: no block, seal or buffer is taken, and the runtime goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import inspect
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from budgets import examples
from hypothesis import example, given
from hypothesis import strategies as st
from tests_support import TICKET, TRACEPARENT, each, small_cache
from wrong_values import REFUSED, alike

import kvflow
from kvflow import (
    CacheGroup,
    CacheLayout,
    Config,
    Limits,
    LoadRequest,
    PeerAddress,
    Runtime,
    RuntimeState,
    Segment,
    ServeRequest,
    StateLayout,
    StateTensor,
    Ticket,
    blocking,
    merge_tickets,
    prefix,
    secret_id,
    storage,
)
from kvflow.attention_backends import layout_for_backend
from kvflow.connector.scheduler import SchedulingConfig
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.core.protocol.ticket import read_ticket
from kvflow.errors import ConfigError, InvalidInput, LayoutError, RequestError
from kvflow.prefix import Prefixes, PrefixRequest, prefix_keys
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.part import Part
from kvflow.runtime.world import World
from kvflow.storage import RestoreRequest, SaveRequest, Storage
from kvflow.testing import InprocPair, assert_quiet, inproc_pair
from kvflow.transport.inproc import InprocNetwork, InprocTransport

BLOCK_SIZE = 4
CONFIG = Config(engine_id="any", drain_timeout_s=1.0, limits=Limits(seal_hold_s=1e-6))


@dataclass(slots=True)
class Sides:
    """A pair with a loop that runs only inside `run`."""

    runner: asyncio.Runner
    pair: InprocPair
    storing: Runtime
    storage: Storage
    """The part of `storing`."""
    prefixes: Prefixes
    """The part of the pair's consumer."""
    ids: Iterator[int] = field(default_factory=itertools.count)

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async def body() -> Any:
            return await work()

        return self.runner.run(body())

    def serve(self, request: Any) -> Ticket:
        """Offer, and withdraw at once."""

        async def body() -> Ticket:
            lease = self.pair.producer.runtime.serve_blocks(request)
            lease.revoke()
            await lease
            return lease.ticket

        return self.run(body)

    def fresh(self, given: Any) -> Any:
        """Return `given`, or for `FRESH` the ticket of an offer that stays open."""
        request = ServeRequest(f"open {next(self.ids)}", [3], BLOCK_SIZE, prompt=[7, 8, 9, 10])

        async def body() -> Any:
            return self.pair.producer.runtime.serve_blocks(request).ticket.to_params()

        return self.run(body) if given is FRESH else given

    def withdraw_all(self) -> None:
        """End what `fresh` has opened."""

        async def body() -> None:
            serving = self.pair.producer.runtime._supervisor.incarnation.serving
            serving.close()
            await serving.drained()

        self.run(body)

    def assert_untouched(self) -> None:
        """Everything is free, and both go on."""
        self.withdraw_all()
        for runtime in (self.pair.producer.runtime, self.pair.consumer.runtime, self.storing):
            assert runtime.state is RuntimeState.OPEN
            assert_quiet(runtime.statistics())
            host = runtime._supervisor.incarnation.host
            assert host.resources.seal_slots.used == host.serving._blocks._seals.used == 0


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def enter() -> tuple[InprocPair, Runtime, Storage, Prefixes]:
            prefixes = Prefixes()
            pair = await stack.enter_async_context(inproc_pair(config=CONFIG, consumer_parts=[prefixes]))
            storage = Storage(tmp_path_factory.mktemp("store"))
            runtime = Runtime(ENGINE["config"], world=quiet_world(), parts=[storage])
            await (await stack.enter_async_context(runtime)).register_kv_caches(*small_cache(layers=1))
            return pair, runtime, storage, prefixes

        sides = Sides(runner, *runner.run(enter()))
        yield sides
        sides.withdraw_all()
        runner.run(stack.aclose())


@pytest.fixture
def sides(opened: Sides) -> Iterator[Sides]:
    yield opened
    opened.assert_untouched()


# --- fields: each class that is passed, a right one, and what is done with it


def annotations(kind: type) -> dict[str, str]:
    names = [entry.name for entry in fields(kind)] if is_dataclass(kind) else kind.__struct_fields__  # type: ignore[attr-defined]
    given = {name: text for base in reversed(kind.__mro__) for name, text in inspect.get_annotations(base).items()}
    return {name: given[name] for name in names}


def values_of(thing: object) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in annotations(type(thing))}


async def bring_nothing(_: object) -> None:
    """No other source."""


def use_serve_request(sides: Sides, **values: Any) -> Any:
    ticket = sides.serve(ServeRequest(**values))
    assert Ticket.from_params(json.loads(json.dumps(ticket.to_params()))) == ticket
    return ticket


def use_load_request(sides: Sides, *, ticket: Any, **values: Any) -> Any:
    request = LoadRequest(ticket=sides.fresh(ticket), **values)
    return sides.run(lambda: sides.pair.consumer.runtime.load_blocks(request))


def use_prefix_request(sides: Sides, **values: Any) -> Any:
    return sides.run(lambda: sides.prefixes.pull(PrefixRequest(**values)))


def use_save_request(sides: Sides, **values: Any) -> Any:
    return sides.run(lambda: sides.storage.save(SaveRequest(**values)))


def use_restore_request(sides: Sides, **values: Any) -> Any:
    use_save_request(sides, **STORED)
    return sides.run(lambda: sides.storage.restore(RestoreRequest(**values)))


def use_peer_address(sides: Sides, **values: Any) -> Any:
    (result,) = sides.run(lambda: sides.pair.consumer.runtime.prewarm([PeerAddress(**values)]))
    if isinstance(result, InvalidInput):
        raise result
    return result


def use_ticket(_: Sides, **values: Any) -> Any:
    ticket = Ticket(**values)
    for use in (ticket.to_params, lambda: ticket.without_leases(**OTHER), lambda: merge_tickets([ticket, ticket])):
        with contextlib.suppress(RequestError):
            use()
    read_ticket(ticket)


FRESH = object()
"""Stands for the ticket of an offer that is made when it is needed."""
STORED: dict[str, Any] = {"request_id": "req", "key": "prompt", "block_ids": [3], "num_tokens": 4}
STORED |= {"deadline_s": 5.0, "priority": 0}
OTHER: dict[str, Any] = {"request_id": "other", "block_ids": [4], "num_tokens": 3, "ttl_s": 2.0}
SEGMENT = Segment(name="x", size=4, units=2, model_units=2)
STATE = {"layers.0": (torch.zeros(3, 4, 2),)}
STATE_TENSORS = (StateTensor(name="conv", segments=(SEGMENT,)),)
STATE_LAYOUT = StateLayout.infer(STATE, STATE_TENSORS)
HAPPENED = SimpleNamespace(query=lambda: True, synchronize=lambda: None)
"""An event."""

SERVED = ServeRequest("req", [3], 4, ttl_s=2.0, reader_count=1, traceparent=TRACEPARENT, prompt=[7, 8, 9, 10])
GROUP: dict[str, Any] = {"name": "sliding", "layers": small_cache(layers=1)[0], "layout": small_cache(layers=1)[1]}
ONE_OF_CONFIG: dict[str, Any] = {"curve_secret_key_file": Path("a.secret"), "curve_peers_dir": "keys"}
ONE_OF_CONFIG |= {"nixl_backend_params": {"a": "b"}, "num_kv_heads": 8, "advertise_host": "10.0.0.7"}
PULLED = PrefixRequest("req", (bytes(32),), 4, [3], (), deadline_s=5.0, answer_within_s=1.0, after=HAPPENED)

USES: dict[type, Callable[..., Any]] = {
    Limits: lambda _, **values: Config(engine_id="e", limits=Limits(**values)).limits,
    ServeRequest: use_serve_request,
    LoadRequest: use_load_request,
    PrefixRequest: use_prefix_request,
    SaveRequest: use_save_request,
    RestoreRequest: use_restore_request,
    PeerAddress: use_peer_address,
    Ticket: use_ticket,
    RankLease: lambda _, **values: use_ticket(_, **values_of(TICKET) | {"ranks": (RankLease(**values),)}),
}
"""The use of a value of a class, if making it is not enough."""
RIGHT: dict[type, tuple[dict[str, Any], type[InvalidInput]]] = {
    Config: (
        values_of(CONFIG) | ONE_OF_CONFIG,
        ConfigError,
    ),
    Limits: (values_of(CONFIG.limits), ConfigError),
    CacheLayout: (values_of(small_cache(layers=1)[1]), LayoutError),
    ServeRequest: (
        values_of(SERVED) | {"ready": HAPPENED, "computed_tokens": 2, "extends": True, "payload": True},
        RequestError,
    ),
    LoadRequest: (
        {
            "request_id": "req",
            "ticket": FRESH,
            "block_ids": [1],
            "deadline_s": 5.0,
            "priority": 0,
            "prompt": [7, 8, 9, 10],
            "after": HAPPENED,
            "verify": True,
            "num_tokens": 4,
            "keep_offer": False,
            "extends": False,
            "cached_tokens": 0,
            "again": bring_nothing,
            "again_max": 1,
        },
        RequestError,
    ),
    PrefixRequest: (values_of(PULLED) | {"recompute_s_per_token": 0.1}, RequestError),
    SaveRequest: (STORED, RequestError),
    RestoreRequest: (STORED, RequestError),
    PeerAddress: (values_of(PeerAddress(engine_id="ghost", address="tcp://127.0.0.1:1")), RequestError),
    CacheGroup: (GROUP | {"window": 8, "kind": "sliding", "pool": "all", "num_kv_heads": 2, "split": 1}, LayoutError),
    Segment: (values_of(SEGMENT), LayoutError),
    StateTensor: ({"name": "conv", "axis": 0, "segments": (SEGMENT,)}, LayoutError),
    StateLayout: (values_of(STATE_LAYOUT), LayoutError),
    SchedulingConfig: (
        values_of(SchedulingConfig(block_size=4, lease_ttl_s=1.0, produces=True, consumes=True)),
        ConfigError,
    ),
    Ticket: (values_of(TICKET), RequestError),
    RankLease: (values_of(TICKET.first), RequestError),
}


def use(kind: type, sides: Sides, /, **changes: Any) -> Any:
    """Use right values with these changes, and return the result."""
    make = USES.get(kind, lambda _, **values: kind(**values))
    return make(sides, **{**RIGHT[kind][0], **changes})


# Messages carry these as they are.
REFUSED_IN: dict[tuple[type, str], Callable[[], list[Any]]] = {
    (Ticket, "ttl_s"): lambda: [None, True, "1", b"1", [], object(), 0, -1.0, *NO_FLOATS],
    (Config, "limits"): lambda: [
        value for value in REFUSED["GivenLimits"]() if type(value) is not dict
    ],  # as files have them
}
NO_FLOATS = (float("nan"), float("inf"), float("-inf"), 10**400)

FIELDS = [(kind, name) for kind in RIGHT for name in annotations(kind)]
NAMED_FIELDS = each(("kind", "name"), FIELDS)


@NAMED_FIELDS
def test_a_field_of_another_type_is_refused_and_named(kind: type, name: str, sides: Sides) -> None:
    for value in (REFUSED_IN.get((kind, name)) or REFUSED[annotations(kind)[name]])():
        with pytest.raises(RIGHT[kind][1]) as caught:
            use(kind, sides, **{name: value})
        message = str(caught.value)
        assert name in message, f"{value!r} is not named: {message}"
        assert len(message) < 400


async def test_what_is_refused_takes_no_host_buffers() -> None:
    """With host staging an offer takes them at once."""
    right, _ = RIGHT[ServeRequest]
    async with inproc_pair(config=replace(CONFIG, staging="always")) as pair:
        runtime = pair.producer.runtime
        for name, annotation in annotations(ServeRequest).items():
            for value in REFUSED[annotation]():
                with pytest.raises(RequestError):
                    runtime.serve_blocks(ServeRequest(**{**right, name: value}))
                assert_quiet(runtime.statistics())
        lease = runtime.serve_blocks(ServeRequest(**right))
        assert runtime.statistics().buffers_used == 1
        await lease.revoke()
        assert_quiet(runtime.statistics())


@NAMED_FIELDS
def test_a_huge_value_is_not_repeated(kind: type, name: str, sides: Sides) -> None:
    """Whether it is right or not: a message is a line."""
    for value in ("x" * 100_000, [0] * 100_000, list(range(100_000)), b"x" * 100_000, {"x" * 100_000: "x" * 100_000}):
        found: InvalidInput | None = None
        try:
            use(kind, sides, **{name: value})
        except InvalidInput as error:
            found = error
        assert len(str(found)) < 500


@NAMED_FIELDS
def test_a_field_in_another_form_is_the_same(kind: type, name: str, sides: Sides) -> None:
    if kind in (Ticket, RankLease) or (kind, name) == (Config, "engine_id"):
        return  # what is made by kvflow, or read from JSON, has one form
    right = RIGHT[kind][0][name]
    for value in alike(right):
        found = getattr(use(kind, sides, **{name: value}), name, None)
        if isinstance(found, bool | int | float | str) and not isinstance(found, enum.Enum):
            assert type(found) in (bool, int, float, str)
            assert found == right


# --- what is public


MADE_BY_KVFLOW = {"Lease", "Load", "LoadReport", "RuntimeStatistics"}
MADE_BY_KVFLOW |= {"Attempt", "PrefixAnswer", "PrefixOffer", "PrefixReport", "SharedPrefixes"}
MADE_BY_KVFLOW |= {"PrefixStatistics", "SharingStatistics", "HandedOnPrefix", "HandOnReport"}
MADE_BY_KVFLOW |= {"PinnedPrefix"}  # made by a prefix cache, whose mistakes are a miss: see test_prefix
MADE_BY_KVFLOW |= {"LeaseRecord", "LoadRecord", "Rank", "SaveReport", "RestoreReport", "StoreStatistics"}
RUN_CALLERS_CODE = {"blocking.Runtime.start": "work", "Storage": "files"}


PARTS = (storage, prefix)


def public_calls() -> Iterator[tuple[str, str]]:
    """Each parameter of each public function, constructor and method."""
    places = [
        ("", kvflow, kvflow.__all__),
        ("blocking.", blocking, ["Runtime"]),
        *(("", part, part.__all__) for part in PARTS),
    ]
    for where, place, names in places:
        for name in names:
            thing = getattr(place, name)
            if name in MADE_BY_KVFLOW or inspect.ismodule(thing) or getattr(thing, "_is_protocol", False):
                continue
            if inspect.isfunction(thing):
                yield from ((name, parameter) for parameter in inspect.signature(thing).parameters)
            elif not issubclass(thing, enum.Enum):
                yield from methods(where + name, thing, constructor=thing not in RIGHT)


def methods(name: str, kind: type, *, constructor: bool) -> Iterator[tuple[str, str]]:
    if constructor:
        yield from ((name, parameter) for parameter in inspect.signature(kind).parameters)
    for method, function in inspect.getmembers(kind, inspect.isroutine):
        if issubclass(kind, Part) and method in vars(Part):
            continue  # its runtime calls it
        if not method.startswith("_") and method in vars(kind) and callable(function):
            for parameter in inspect.signature(function).parameters:
                if parameter != "self":
                    yield f"{name}.{method}", parameter


PUBLIC = [call for call in public_calls() if RUN_CALLERS_CODE.get(call[0]) != call[1]]


def test_the_looking_sees_what_is_public() -> None:
    assert {"Runtime", "Runtime.load_blocks", "merge_tickets", "CacheLayout.infer", "blocking.Runtime.drain"} <= {
        call for call, _ in PUBLIC
    }
    classes = [
        getattr(place, name) for place in (kvflow, *PARTS) for name in place.__all__ if name not in MADE_BY_KVFLOW
    ]
    passed = {kind for kind in classes if inspect.isclass(kind)}
    assert {kind for kind in passed if is_dataclass(kind) or issubclass(kind, msgspec.Struct)} <= set(RIGHT)


def wrong_for_anything() -> list[Any]:
    """Return values that are wrong for every parameter that does not accept anything."""
    return [object(), int, 1j, 1.5, -1, b"x", [None], "\ud800", {1: 2}, [[]]]


CACHES, LAYOUT = small_cache(layers=1)
ENGINE = {"config": Config(engine_id="e", transport="inproc", listen="tcp://127.0.0.1:0")}
INFER = {"order": "HND", "block_size": 4, "style": None, "layer_indices": None, "kv_format": "plain"}
BACKEND = {"backend": "FLASH_ATTN", "block_size": 4, "engine_version": "0.11", "num_kv_heads": 2}
AWAITED = Ticket.rendezvous(TICKET, "declined")
REPORT = LoadReport(request_id="req", bytes=1, tokens=4, blocks=1, descriptors=1, sources=(), notified=True, seconds={})
HANDED_ON = {"successor": "tcp://127.0.0.1:1", "prefixes": (), "key_tokens": 4, "bytes_max": 1, "within_s": 1.0}
VERBS: dict[str, dict[str, Any]] = {
    "accept": {"take": print, "predecessors": ()},
    "connect": {"peers": (), "within_s": 1.0},
    "decline": {"request_id": "declined", "reason": "", "at": AWAITED, "instead": AWAITED},
    "drain": {"deadline_s": 1.0, "successor": None},
    "drop": {"keys": ["prompt"]},
    "forget_peer": {"engine_id": "e", "address": None},
    "hand_on": HANDED_ON,
    "has": {"key": "prompt"},
    "keep_leases": {"ticket": TICKET},
    "learn": {"ticket": TICKET, "report": REPORT},
    "load_blocks": {"request": None},
    "prewarm": {"engines": ()},
    "pull": {"request": None},
    "reclaim": {"blocks": 1},
    "seek": {"request": None},
    "share": {"cache": None, "pinned_blocks_max": None},
    "register_kv_caches": {"kv_caches": CACHES, "layout": LAYOUT, "copy_blocks": None},
    "release_blocks": {"ticket": TICKET},
    "restore": {"request": None},
    "save": {"request": None},
    "serve_blocks": {"request": None},
    "set_weights": {"version": "step-7"},
    "start_load": {"request": None},
}
"""The verbs of a runtime, in asyncio or in threads, and arguments that are right for them."""
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "CacheLayout.check": (LAYOUT.check, {"kv_caches": CACHES}),
    "CacheLayout.infer": (CacheLayout.infer, {"kv_caches": CACHES, **INFER}),
    "Runtime": (Runtime, {**ENGINE, "observers": (), "world": None, "parts": ()}),
    "StateLayout.check": (STATE_LAYOUT.check, {"caches": STATE}),
    "StateLayout.infer": (StateLayout.infer, {"caches": STATE, "tensors": STATE_TENSORS, "layer_indices": None}),
    "Ticket.address_of": (TICKET.address_of, {"rank": None}),
    "Ticket.find": (TICKET.find, {"rank": None}),
    "Ticket.from_params": (Ticket.from_params, {"params": TICKET.to_params()}),
    "Ticket.rendezvous": (
        Ticket.rendezvous,
        {"introduction": TICKET, "request_id": "other", "ttl_s": 2.0, "traceparent": TRACEPARENT},
    ),
    "Ticket.without_leases": (TICKET.without_leases, {**OTHER, "prompt_digest": ""}),
    "Prefixes": (Prefixes, {"follow_successors": False}),
    "Storage": (Storage, {"folder": "blocks", "bytes_max": 1 << 20, "files": None}),
    "blocking.Runtime": (blocking.Runtime, {**ENGINE, "observers": (), "call_timeout_s": 1.0}),
    "layout_for_backend": (
        layout_for_backend,
        {"kv_caches": {"l": torch.zeros(2, 3, 4, 2, 8)}, **BACKEND, "kv_format": None, "layer_indices": None},
    ),
    "merge_tickets": (merge_tickets, {"tickets": [TICKET]}),
    "secret_id": (secret_id, {"request_id": "req"}),
    "prefix_keys": (prefix_keys, {"tokens": [1, 2, 3, 4], "block_tokens": 2, "salt": b""}),
}
"""All other public calls."""


def call(name: str, sides: Sides, parameter: str, value: object) -> None:
    """Call a function with `value` for a parameter, and right values for all others."""
    if name in CALLS:
        function, right = CALLS[name]
        function(**{**right, parameter: value})
        return
    kind, _, verb = name.rpartition(".")
    arguments = {**VERBS.get(verb, {}), parameter: value}
    found = called_in_threads(verb, arguments) if kind == "blocking.Runtime" else called(sides, verb, arguments)
    if verb == "prewarm":
        raise found[0]


def called(sides: Sides, verb: str, arguments: dict[str, Any]) -> Any:
    async def body() -> Any:
        if verb == "register_kv_caches":
            async with Runtime(ENGINE["config"], world=quiet_world()) as runtime:
                with pytest.raises(InvalidInput) as caught:
                    await runtime.register_kv_caches(**arguments)
                await runtime.register_kv_caches(CACHES, LAYOUT)
                raise caught.value
        owner: Any = sides.pair.consumer.runtime
        owner = next((part for part in (sides.storage, sides.prefixes) if hasattr(part, verb)), owner)
        found = getattr(owner, verb)(**arguments)
        return await found if inspect.isawaitable(found) else found

    return sides.run(body)


def called_in_threads(verb: str, arguments: dict[str, Any]) -> Any:
    with blocking.Runtime(ENGINE["config"], world=quiet_world()) as runtime:
        if verb != "register_kv_caches":
            runtime.register_kv_caches(CACHES, LAYOUT)
        found = getattr(runtime, verb)(**arguments)
        match verb:
            case "start_load":
                found.result(60)
            case "keep_leases":
                with found:
                    pass
        return found


def quiet_world() -> World:
    return World(transport=lambda _, name: InprocTransport(name, InprocNetwork()))


def is_right(parameter: str, value: object) -> bool:
    """Whether a value that is wrong for most is right for that parameter."""
    a_key = parameter in ("key", "salt") and type(value) is bytes
    a_header = parameter == "traceparent" and isinstance(value, str)
    return (
        a_key
        or a_header
        or (parameter.endswith("_s") and value == 1.5)
        or (parameter in ("copy_blocks", "take") and value is int)
    )


@each(("name", "parameter"), PUBLIC)
def test_an_argument_that_cannot_be_is_refused(name: str, parameter: str, sides: Sides) -> None:
    for value in wrong_for_anything():
        if is_right(parameter, value):
            continue
        with pytest.raises(InvalidInput) as caught:
            call(name, sides, parameter, value)
        assert len(str(caught.value)) < 700


# --- what is offered can be read


NUMBERS = st.one_of(
    st.integers(-2, 70),
    st.integers(),
    st.sampled_from([1 << 63, (1 << 63) - 1, 1 << 70, -(1 << 63), 10**400]),
    st.floats(),
    st.booleans(),
    st.integers(0, 64).map(np.int64),
    st.none(),
)
TEXTS = st.one_of(
    st.text(max_size=6),
    st.text(st.characters(codec=None), min_size=1, max_size=6),
    st.sampled_from(["\ud800", "a\udfff", "\0", "\n", "\x1b[2J", "é", "😀" * 512, "x" * 512, "x" * 513, ""]),
    st.none(),
)
PROMPTS = st.one_of(
    st.none(),
    st.lists(NUMBERS, max_size=9),
    st.lists(st.integers(0, 1 << 31), min_size=8, max_size=40),
    st.sampled_from(["abcdefghi", b"abcdefghi", {7: 7}, 7]),
    st.lists(st.integers(0, 1 << 31), min_size=8, max_size=40).map(np.array),
)


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "request_id": TEXTS,
        "block_ids": st.lists(st.integers(-1, 16) | NUMBERS, max_size=3) | PROMPTS,
        "num_tokens": NUMBERS,
        "ttl_s": st.none() | NUMBERS | st.floats(1e-300, 1e9),
        "reader_count": NUMBERS,
        "traceparent": st.sampled_from(["", TRACEPARENT, TRACEPARENT + "\n"]) | TEXTS,
        "prompt": PROMPTS,
        "computed_tokens": st.none() | NUMBERS,
    },
)


@examples(30, 100)
@given(changes=CHANGES)
@example({"num_tokens": float("nan")})
@example({"num_tokens": 32.0})
@example({"num_tokens": 1 << 70})
@example({"traceparent": None})
@example({"request_id": "a\udfff"})
@example({"ttl_s": 10**400})
@example({"prompt": {1: 2, 3: 4}})
@example({"request_id": np.str_("r"), "num_tokens": np.int64(8), "ttl_s": np.float32(0.5)})
def test_whatever_is_offered_readers_can_read(opened: Sides, changes: dict[str, Any]) -> None:
    """A ticket survives every router, and equals the original. A request that no reader could read is refused."""
    try:
        ticket = opened.serve(ServeRequest(**{"request_id": "r", "block_ids": [3, 4], "num_tokens": 8, **changes}))
    except RequestError:
        return
    finally:
        opened.assert_untouched()
    assert Ticket.from_params(json.loads(json.dumps(ticket.to_params(), allow_nan=False))) == ticket
    assert read_ticket(ticket) == ticket
    codec.encode(
        messages.LeaseRequest(
            reader="r",
            target=Address(ticket.engine_id, Rank(0, 0, 0), "tcp://127.0.0.1:1"),
            request_id=ticket.request_id,
            num_tokens=ticket.num_tokens,
            blocks_digest=messages.digest_of(ticket.block_ids),
        )
    )
