"""The tree of errors: what each class answers is what the drawing says, and all of it survives its way elsewhere."""

from __future__ import annotations

import ast
import concurrent.futures
import copy
import dataclasses
import functools
import importlib
import multiprocessing
import pickle
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from raising import raise_it

import kvflow
from kvflow import errors
from kvflow.errors import (
    Blame,
    DeadlineExceeded,
    KVFlowError,
    LoadError,
    PeerError,
    PeerUnreachable,
    QuarantineNotice,
    RequestError,
    StoreError,
    UsageError,
)
from tests.support.source_trees import parsed
from tests.support.tests_support import each

PACKAGE = Path(kvflow.__file__).parent
NOT_HERE = ("kvflow.ray.ray_metrics", "kvflow.sglang", "kvflow.vllm")  # they need Ray, SGLang, and vLLM


def subclasses(kind: type[KVFlowError]) -> Iterator[type[KVFlowError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from subclasses(child)


def all_classes() -> list[type[KVFlowError]]:
    """Every class of the tree, wherever in kvflow it is."""
    for module in pkgutil.walk_packages(kvflow.__path__, "kvflow."):
        if not module.name.startswith(NOT_HERE):
            importlib.import_module(module.name)
    return [kind for kind in dict.fromkeys(subclasses(KVFlowError)) if kind.__module__.startswith("kvflow.")]


CLASSES = all_classes()
OF_CLASS = each("kind", CLASSES)
PUBLIC = [kind for kind in CLASSES if kind.__module__ == "kvflow.errors"]


def answers(kind: type[KVFlowError]) -> tuple[Blame, bool, bool]:
    return kind.blame, kind.retryable, kind.memory_safe


class Held:
    """A quarantine as a load is one: it cannot leave its process."""

    request_id, block_ids, safe = "req-1", (3, 4), False

    async def settled(self) -> None:
        return

    def __reduce__(self) -> Any:
        raise AssertionError("a load was pickled")


def made(kind: type[KVFlowError]) -> KVFlowError:
    """An error of that class, with everything that errors of its class carry."""
    words: dict[str, Any] = {}
    if issubclass(kind, PeerError):
        words = {"peer": "tcp://h:1", "engine_id": "e", "request_id": "r", "retry_after_s": 0.5}
    elif issubclass(kind, DeadlineExceeded):
        words = {"request_id": "r", "peer": "tcp://h:1", "phase": "wire"}
    elif issubclass(kind, StoreError):
        words = {"request_id": "r"}
    elif issubclass(kind, LoadError):
        words = {"request_id": "r", "peer": "tcp://h:1"}
    error = kind("what happened: 'ours' and \ud800", **words)
    error.add_note("a note")
    return error


# --- they go elsewhere


def same(found: KVFlowError, error: KVFlowError) -> None:
    assert found is not error
    assert (type(found), str(found), found.args) == (type(error), str(error), error.args)
    assert found.__notes__ == ["a note"]
    assert vars(found) | {"quarantine": None} == vars(error) | {"quarantine": None}


@OF_CLASS
@each("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickling_and_tells_of_its_quarantine(kind: type[KVFlowError], protocol: int) -> None:
    error = made(kind)
    same(pickle.loads(pickle.dumps(error, protocol)), error)
    assert pickle.loads(pickle.dumps(error, protocol)).quarantine is None
    error.quarantine = held = Held()
    found = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(error, protocol)), protocol))  # as through two pools
    same(found, error)
    assert found.quarantine == QuarantineNotice("req-1", (3, 4), safe=False)
    assert error.quarantine is held, "the original keeps the load"


async def test_what_is_told_of_cannot_be_awaited() -> None:
    with pytest.raises(UsageError, match="'req-1': a quarantine is awaited in the process that owns its blocks"):
        await QuarantineNotice("req-1", (3, 4), safe=False).settled()


@OF_CLASS
@each("copied", [copy.copy, copy.deepcopy])
def test_a_copy_is_the_same_with_the_same_quarantine(kind: type[KVFlowError], copied: Any) -> None:
    """It stays in the process, so it can be awaited there."""
    error = made(kind)
    error.quarantine = held = Held()
    found = copied(error)
    same(found, error)
    assert found.quarantine is held
    found.add_note("of the copy")
    assert error.__notes__ == ["a note"]


def test_an_error_comes_home_from_a_pool_of_processes() -> None:
    sent = made(DeadlineExceeded)
    sent.quarantine = Held()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
        with pytest.raises(DeadlineExceeded, match="what happened") as caught:
            pool.submit(raise_it, sent).result(60)
        with pytest.raises(RequestError, match="ticket: "):
            pool.submit(kvflow.Ticket.from_params, {}).result(60)
    found = caught.value
    assert (found.request_id, found.peer, found.phase) == ("r", "tcp://h:1", "wire")
    assert found.quarantine == QuarantineNotice("req-1", (3, 4), safe=False)
    assert "a note" in found.__notes__


def test_the_same_failure_as_a_request_met_it_names_the_request() -> None:
    shared = PeerUnreachable("tcp://h:1: nobody", peer="tcp://h:1", retry_after_s=0.5)
    error = shared.of_request("req-1", "prefill-0")
    assert str(error) == "request 'req-1' from 'prefill-0': tcp://h:1: nobody"
    assert (error.request_id, error.engine_id, error.peer) == ("req-1", "prefill-0", "tcp://h:1")
    assert (error.retry_after_s, error.__cause__) == (0.5, shared)
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


@OF_CLASS
def test_no_error_is_longer_than_what_can_be_read(kind: type[KVFlowError]) -> None:
    """The beginning, which names the request, stays, and so does the advice at the end."""
    words = {name: value for name, value in vars(made(kind)).items() if name not in ("__notes__", "blame")}
    error = kind(f"request 'r': {'theirs ' * 100_000}: set advertise_host", **words)
    assert (len(str(error)), str(error)[:12], str(error)[-19:]) == (
        2000,
        "request 'r':",
        "set advertise_host"[-19:].rjust(19),
    )
    assert len(error.args[0]) == 2000
    if isinstance(error, PeerError | LoadError | RequestError):
        retold = error.of_request("req-1", "prefill-0")
        assert len(str(retold)) <= 2000
        assert str(retold).startswith("request 'req-1'")
    error.add_note("a note" * 10_000)
    assert len("".join(error.__notes__)) == 500
    assert str(kind("plain", **words)) == "plain"


@OF_CLASS
def test_an_error_of_another_request_is_retold_and_one_of_its_own_is_not(kind: type[KVFlowError]) -> None:
    error = made(kind)
    if not isinstance(error, PeerError | LoadError | RequestError):
        return
    found = error.of_request("req-1", "prefill-0")
    assert type(found) is kind
    assert str(found).startswith("request 'req-1'")
    assert str(found).endswith(str(error))
    assert found.__cause__ is error
    if isinstance(error, PeerError):  # of a handshake, which names none
        return
    assert vars(found) == vars(error) | {"request_id": "req-1"} if isinstance(error, LoadError) else vars(error)
    assert found.of_request("req-1", "prefill-0") is found


# --- what they answer


DRAWN = re.compile(r"^    ((?:\|  |   )*)[|`]- (\w+) +(\w+) +(retry|do not retry) +(safe|ask) +(\S.*)$", re.MULTILINE)


def drawing() -> dict[str, tuple[str, Blame, bool, bool]]:
    """Return the parent and the properties of each class of the drawing."""
    above: dict[int, str] = {-1: "KVFlowError"}
    found = {}
    for indent, name, blame, again, memory, _ in DRAWN.findall(errors.__doc__ or ""):
        depth = len(indent) // 3
        above[depth] = name
        found[name] = (above[depth - 1], Blame(blame), again == "retry", memory == "safe")
    return found


def test_the_drawing_is_the_tree() -> None:
    drawn = drawing()
    lines = [line for line in (errors.__doc__ or "").splitlines() if "- " in line and line.startswith("    ")]
    assert len(drawn) == len(lines) == len(PUBLIC) - 1
    for kind in PUBLIC:
        if kind is not KVFlowError:
            (parent,) = kind.__bases__
            assert drawn[kind.__name__] == (parent.__name__, *answers(kind))


@functools.cache
def called_names() -> set[str]:
    """Return the classes that kvflow calls or passes on as errors to raise, not classes that it only catches."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            match node:
                case ast.Call(func=ast.Name(id="failure"), args=[ast.Name(id=name), *_]):
                    names.add(name)
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                    names.add(name)
                case ast.keyword(arg="error", value=ast.Name(id=name)) | ast.IfExp(body=ast.Name(id=name)):
                    names.add(name)
    return names


def test_a_group_is_not_raised_itself() -> None:
    assert {"KVFlowError", "PeerError", "LoadError", "InvalidInput", "RuntimeUnavailable"} & called_names() == set()
    assert {"RequestError", "ConfigError", "PeerUnreachable", "RuntimeBroken"} <= called_names()


def test_who_catches_a_class_and_acts_on_its_answers_is_not_wrong_about_those_below() -> None:
    """A class below a raised class has the same properties. A group is safe, or retried, if all its classes are."""
    raised = called_names()
    for kind, above in ((kind, above) for kind in CLASSES for above in CLASSES if issubclass(kind, above)):
        if above.__name__ in raised:
            assert answers(kind) == answers(above), f"{kind.__name__} turns {above.__name__} around"
        assert kind.memory_safe or not above.memory_safe
        assert kind.retryable or not above.retryable


WHEN_FULL: dict[str, type[KVFlowError] | str] = {
    "leases_max": errors.Overloaded,
    "host_buffer_bytes_max": errors.HostBlocksBusy,
    "loads_waiting_max": errors.Overloaded,
    "peers_max": errors.Overloaded,
    "first_contacts_max": errors.Overloaded,
    "bytes_max": errors.StoreFull,
    "digests_max": errors.PeerNotReady,
    "source_ranks_max": "loads wait",
    "in_flight_bytes_max": "reads wait",
    "slices_in_flight_max": "reads wait",
    "peer_in_flight_bytes_max": "reads wait",
    "scratch_slots_max": "loads wait",
    "readers_max": "one is forgotten",
    "side_channel_requests_per_s_max": "readers ask again",
    "side_channel_connections_max": "readers connect again",
    "load_ranks_max": "size of one load",
    "block_ids_max": "size of one request",
    "slice_bytes_max": "size of one slice",
    "slice_descriptors_max": "size of one slice",
    "scratch_slot_bytes_max": "size of one buffer",
}
"""For each limit the error if the engine has reached it, or what happens instead of an error."""


def test_an_engine_that_is_full_never_blames_its_caller_and_says_that_another_may_do_it() -> None:
    """The test of each limit raises it: `test_leases_are_bounded_and_the_limit_is_named` and others."""
    fields = [*dataclasses.fields(kvflow.Config), *dataclasses.fields(kvflow.Limits)]
    limits = {field.name for field in fields if field.name.endswith("_max")}
    assert limits | {"bytes_max"} == WHEN_FULL.keys()
    for name, full in WHEN_FULL.items():
        if not isinstance(full, str):
            assert (full.blame is Blame.CALLER, full.retryable) == (False, True), name
