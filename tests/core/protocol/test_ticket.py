"""Tickets: what a rank writes can be read after any router, and what no rank would have written is refused."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.structs import asdict, replace

from kvflow.config import Config, rank_offset
from kvflow.core.cache.groups import GroupFacts, GroupKind, tokens_held
from kvflow.core.plan.topology import Rank, parallelism_of
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.notifications import ReadDone
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.core.protocol.ticket import Ticket, check_lease, merge_tickets, read_ticket, with_changes
from kvflow.errors import RequestError
from tests.core.plans import SHARE
from tests.support.budgets import examples
from tests.support.tests_support import each

WIRE = """{
    "do_remote_prefill": true, "do_remote_decode": false,
    "remote_engine_id": "prefill-0", "remote_request_id": "req-1", "remote_block_ids": [3, 7, 9],
    "remote_host": "10.0.0.7", "remote_port": 5601, "tp_size": 2,
    "kvflow": {
        "version": 6, "num_tokens": 41, "ttl_s": 30.0, "dp_rank": 4, "pp_size": 3, "block_size": 16, "kv_heads": 8,
        "model_kv_heads": 16, "fixed_ports": true, "prompt_digest": "77c8f92f6ccb8f0a3b1b3a1cc7a5b7b5",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "ranks": [
            {"pp_rank": 0, "tp_rank": 1, "lease_id": "0123456789abcdef0123456789abcdef", "seal_index": 17,
             "incarnation": "8f14e45fceea167a",
             "digest": "3124f67e7748319bd76fca61"},
            {"pp_rank": 1, "tp_rank": 0, "lease_id": "fedcba9876543210fedcba9876543210", "seal_index": 3,
             "incarnation": "c9f0f895fb98ab91",
             "host": "10.0.0.8", "port": 5602, "block_ids": [30, 70, 90],
             "digest": "4f90a5fabd0ca06283873e41"}]}}"""
"""Routers forward these field names."""
TICKET = Ticket.from_params(json.loads(WIRE))
FIRST, SECOND = TICKET.ranks
LEASE_ID = FIRST.lease_id


def after_json(ticket: Ticket) -> Ticket:
    return Ticket.from_params(json.loads(json.dumps(ticket.to_params(), allow_nan=False)))


# --- there and back

names = st.text(st.characters(codec="utf-8", exclude_categories=["Z", "C"]), min_size=1, max_size=20)


@st.composite
def tickets(draw: st.DrawFn) -> Ticket:
    count = draw(st.integers(0, 6))
    ids = st.lists(st.integers(0, 2**31), min_size=count, max_size=count).map(tuple)
    lease = st.builds(
        RankLease,
        pp_rank=st.integers(0, 7),
        tp_rank=st.integers(0, 63),
        lease_id=st.binary(min_size=16, max_size=16).filter(any).map(bytes.hex),
        seal_index=st.integers(0, 2**24),
        incarnation=names,
        host=st.sampled_from(["127.0.0.1", "::1", "node-7.cluster.local"]),
        port=st.integers(1, 65535),
        block_ids=ids | st.none(),
    )
    ticket = st.builds(
        Ticket,
        engine_id=names,
        request_id=st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
        block_ids=ids,
        num_tokens=st.integers(0, 2**31),
        ttl_s=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
        tp_size=st.integers(64, 1024),
        pp_size=st.integers(8, 1024),
        dp_rank=st.integers(0, 100),
        block_size=st.integers(1, 4096),
        kv_heads=st.integers(1, 128),
        model_kv_heads=st.integers(0, 128),
        fixed_ports=st.booleans(),
        prompt_digest=st.sampled_from(["", "0123456789abcdef" * 2]),
        traceparent=st.sampled_from(["", TICKET.traceparent]),
        ranks=st.lists(lease, min_size=1, max_size=3, unique_by=lambda one: (one.pp_rank, one.tp_rank)).map(tuple),
    )
    return draw(ticket)


@examples(60, 300)
@given(ticket=tickets())
def test_a_ticket_survives_json_and_fields_of_others(ticket: Ticket) -> None:
    params = ticket.to_params()
    travelled = json.loads(json.dumps(params, allow_nan=False))
    assert travelled == params  # so that a router's copy and the original are interchangeable
    assert Ticket.from_params(params) == Ticket.from_params(travelled) == ticket
    ranks = [{**rank, "later": 1} for rank in travelled["kvflow"]["ranks"]]
    crowded = {**travelled, "added_by_router": [{"deep": None}], "kvflow": {**travelled["kvflow"], "ranks": ranks}}
    assert Ticket.from_params(crowded) == ticket


def test_the_field_names_that_routers_forward() -> None:
    assert TICKET.to_params() == json.loads(WIRE)
    assert (TICKET.engine_id, TICKET.request_id, TICKET.block_ids) == ("prefill-0", "req-1", (3, 7, 9))
    assert (TICKET.tp_size, TICKET.pp_size, TICKET.dp_rank) == (2, 3, 4)
    assert (TICKET.lease_id, SECOND.block_ids) == ("0123456789abcdef0123456789abcdef", (30, 70, 90))
    assert [lease.address for lease in TICKET.ranks] == [TICKET.address, SECOND.address]
    assert (TICKET.address, SECOND.address) == ("tcp://10.0.0.7:5601", "tcp://10.0.0.8:5602")


def test_a_router_that_knows_the_producer_by_another_name_is_believed() -> None:
    """Routers see the first rank's address, and may rewrite it."""
    found = Ticket.from_params({**TICKET.to_params(), "remote_host": "proxy", "remote_port": 7})
    assert [lease.address for lease in found.ranks] == ["tcp://proxy:7", "tcp://10.0.0.8:5602"]


# --- what is refused


def where_of(params: dict[str, Any], path: str) -> tuple[Any, str]:
    """Return the container of the field at a path such as "kvflow.ranks.0.lease_id", and the field's name."""
    where: Any = params
    *parents, name = path.split(".")
    for parent in parents:
        where = where[int(parent) if parent.isdigit() else parent]
    return where, name


def with_value(path: str, value: object) -> dict[str, Any]:
    """The ticket's dict with another value at `path`."""
    params = TICKET.to_params()
    where, name = where_of(params, path)
    where[name] = value
    return params


_PARAMS = TICKET.to_params()
OF_RANKS = [f"kvflow.ranks.{rank}." for rank in (0, 1)]
RANK_FIELDS = ["pp_rank", "tp_rank", "lease_id", "seal_index", "incarnation"]
REQUIRED = [*_PARAMS, *(f"kvflow.{name}" for name in _PARAMS["kvflow"])]
REQUIRED += [f"{rank}{name}" for rank in OF_RANKS for name in RANK_FIELDS]
REQUIRED += [f"{OF_RANKS[1]}{name}" for name in ("host", "port")]  # the first one's are where routers look for them
BLOCK_IDS = ["remote_block_ids", f"{OF_RANKS[1]}block_ids"]
HOSTS = ["remote_host", "kvflow.ranks.1.host"]
PORTS = ["remote_port", "kvflow.ranks.1.port"]
LEASE_IDS = [f"{rank}lease_id" for rank in OF_RANKS]
NAMES = ["remote_engine_id", *(f"{rank}incarnation" for rank in OF_RANKS), *HOSTS]
PLACES = [f"{rank}{name}" for rank in OF_RANKS for name in ("pp_rank", "tp_rank")]
RANK_COUNTS = ["tp_size", "kvflow.pp_size"]
COUNTS = ["kvflow.num_tokens", "kvflow.dp_rank", "kvflow.model_kv_heads", *(f"{rank}seal_index" for rank in OF_RANKS)]


def key_of(path: str) -> str:
    return path.rpartition(".")[2]


def required(kind: type) -> list[str]:
    """The fields that hold such a value."""
    return [path for path in REQUIRED if type(where_of(_PARAMS, path)[0][key_of(path)]) is kind]


def test_the_fields_below_are_all_there_are() -> None:
    later = {
        "more_block_ids",
        "groups",
        "more_kinds",
        "pending",
        "payload",
        "held",
        "weights",
        "digest",
    }  # not of every ticket
    known = {*_PARAMS, *_PARAMS["kvflow"], *RankLease.__struct_fields__}
    assert {key_of(path) for path in [*REQUIRED, *BLOCK_IDS]} == known - later
    assert [len(required(kind)) for kind in (int, str, bool, float)] == [16, 10, 3, 1]


WRONG: list[tuple[list[str], tuple[object, ...]]] = [
    # types
    (REQUIRED, (None, [None], Ellipsis, {"x": 1}, b"bytes")),
    (required(str), (7, True, ["text"])),
    (required(int), ("1", True, 1.5, [1], 2**63, 2**70, 10**400, -(2**63) - 1)),
    (required(bool), (1, "true")),
    (required(float), ("30", True, float("nan"), float("inf"), float("-inf"))),
    (BLOCK_IDS, ("123", [1, "2"], [1, 2.5], [1, True], [["1"]], {"0": 1}, [1, 2, 2**63], [2**70], [-(2**63) - 1])),
    (["kvflow"], ([], "kvflow")),
    (["kvflow.ranks"], ("ranks", {"0": {}}, [[]])),
    # values
    (["do_remote_prefill"], (False,)),
    (["kvflow.version"], (0, 1, 2, 4, 5, 7, -1)),
    (["kvflow.ttl_s"], (0, 0.0, -1.0)),
    (PORTS, (0, -1, 65536)),
    (RANK_COUNTS, (0, -1, 1025, 2**63 - 1)),
    (PLACES, (-1, 3, 2**63 - 1)),
    (["kvflow.ranks.0.tp_rank", "kvflow.ranks.1.tp_rank"], (2,)),
    (COUNTS, (-1,)),
    (["kvflow.block_size", "kvflow.kv_heads"], (0, -1)),
    (LEASE_IDS, (LEASE_ID[:-1], LEASE_ID + "0", LEASE_ID + "\n", "g" * 32, " " * 32, "０" * 32, "0" * 32)),
    (NAMES, ("", "a b", "a\n", "\t", "x" * 1025, "a\u2003b")),
    (NAMES, ("\ud800", "a\udfffb")),  # JSON may carry half a surrogate pair; UTF-8, hence every message, cannot
    (NAMES, ("a\x00b", "a\x1bb")),  # a NUL ends a host for C; control characters forge log lines
    (HOSTS, ("0.0.0.0", "*", "[::]", "::", "[h]", "[10.0.0.7]", "fd00::2%", "fd00::2%a b", "h:1", "tcp://h")),
    (HOSTS, ("a..b", "a.b." + "c" * 64)),  # Python's resolver answers with a UnicodeError instead of an OSError
    ([f"{rank}weights" for rank in OF_RANKS], ("two words", "x" * 129, "\ud800", "a\x00b", 7, None)),
    (["kvflow.prompt_digest"], ("0" * 31, "0" * 33, "0" * 32 + "\n", "g" * 32, "٠" * 32)),
    (["remote_request_id"], ("", "x" * 1025)),
    (["kvflow.ranks"], ([], _PARAMS["kvflow"]["ranks"][1:] * 1025)),
]


@each(("path", "value"), [(path, value) for paths, values in WRONG for path in paths for value in values])
def test_a_wrong_field_is_named(path: str, value: object) -> None:
    name = key_of(path).removeprefix("remote_").replace("seal_index", "(seal_index|Expected `int`)")
    with pytest.raises(RequestError, match=rf"^ticket: .*\b(remote_)?{name}\b") as caught:
        Ticket.from_params(with_value(path, value))
    assert len(str(caught.value)) < 300


@each(
    "paths", [["tp_size"], ["kvflow.version"], ["kvflow.num_tokens"], [*PORTS, *RANK_COUNTS, *PLACES, "kvflow.ttl_s"]]
)
def test_numbers_that_a_router_has_turned_into_doubles_are_read(paths: list[str]) -> None:
    params = TICKET.to_params()
    for path in paths:
        where, name = where_of(params, path)
        where[name] = float(where[name])
    assert Ticket.from_params(params) == TICKET
    where, name = where_of(params, paths[0])
    where[name] = 1.5
    with pytest.raises(RequestError, match=rf"^ticket: .*\b{key_of(paths[0])}\b.*1\.5"):
        Ticket.from_params(params)


@each("path", REQUIRED)
def test_a_missing_field_is_named(path: str) -> None:
    params = TICKET.to_params()
    where, name = where_of(params, path)
    del where[name]
    with pytest.raises(RequestError, match=rf"^ticket: .*{name}\b"):
        Ticket.from_params(params)


# JSON may carry half a surrogate pair in a key, too.
FOREIGN_KEYS = [with_value(path, 1) for path in ("kvflow.\ud800", "kvflow.ranks.0.\ud800")]


@each("params", [None, [], 5, "ticket", b"{}", {}, {1: 2}, Ellipsis, *FOREIGN_KEYS])
def test_what_is_no_dict_of_a_ticket_is_refused(params: Any) -> None:
    with pytest.raises(RequestError, match=r"^ticket: "):
        Ticket.from_params(params)


def test_what_a_router_adds_may_have_any_name() -> None:
    assert Ticket.from_params({**TICKET.to_params(), "\ud800": 1}) == TICKET


def test_no_ticket_exists_that_was_not_checked() -> None:
    """The constructor accepts the values of a dict, and copies are equal."""
    values = asdict(TICKET)
    assert Ticket(**values) == TICKET == pickle.loads(pickle.dumps(TICKET)) == copy.copy(TICKET)
    assert Ticket(**values | {"block_ids": [3, 7, 9], "ranks": [FIRST, asdict(SECOND)]}) == TICKET
    for name, value, problem in (
        ("num_tokens", "41", "num_tokens`, got '41'; a number is written without quotes$"),
        ("num_tokens", True, "num_tokens"),
        ("block_ids", {3, 7, 9}, "block_ids"),
        ("block_ids", (3, 7), r"blocks by group: \(2,\), but \(3,\) of tp_rank 0"),
        ("request_id", "\ud800", "not a valid request id"),
        ("ranks", (), "ranks"),
    ):
        with pytest.raises(RequestError, match=rf"^ticket: .*{problem}"):
            Ticket(**values | {name: value})
    with pytest.raises(RequestError, match=r"required field `ttl_s`"):
        Ticket(**{name: value for name, value in values.items() if name != "ttl_s"})
    with pytest.raises(RequestError, match=r"^ticket: remote_host 'a b' is not a host"):
        RankLease(**asdict(FIRST) | {"host": "a b"})
    with pytest.raises(TypeError, match="Ticket has no fields"):
        Ticket(**values, colour="red")


WRONG_OF_LEASES: dict[str, tuple[object, ...]] = {
    "seal_index": (-1, 1 << 63),
    "tp_rank": (2,),
    "lease_id": ("0" * 32, "g" * 32),
    "incarnation": ("", "x" * 1025),
    "block_ids": ((1, 2), (1, 2, 1 << 63)),
}


@each(("name", "value"), [(name, value) for name, values in WRONG_OF_LEASES.items() for value in values])
def test_a_lease_that_a_rank_names_is_judged_like_those_of_tickets(name: str, value: object) -> None:
    check_lease(SECOND, TICKET)
    with pytest.raises(RequestError, match=rf"^ticket: .*({name}|blocks)"):
        check_lease(RankLease(**{**asdict(SECOND), name: value}), TICKET)


@each("rank", [0, 1])
@each("block_ids", [[], [1, 2], [1, 2, 3, 4]])
def test_a_rank_offers_as_many_blocks_as_the_ticket_names(rank: int, block_ids: list[int]) -> None:
    problem = rf"^ticket: blocks by group: \(3,\), but \({len(block_ids)},\) of tp_rank {1 - rank}$"
    with pytest.raises(RequestError, match=problem):
        Ticket.from_params(with_value(f"kvflow.ranks.{rank}.block_ids", block_ids))


class Unread(list[Any]):
    """A list that must not be read."""

    def __iter__(self) -> Any:
        raise AssertionError("it was read")


@each("path", ["remote_block_ids", "kvflow.ranks.0.block_ids", "kvflow.ranks.1.block_ids"])
def test_too_many_block_ids_are_refused_before_they_are_read(path: str) -> None:
    """Those of the ranks count as well, and those in another mapping."""
    for ticket in (TICKET, TICKET.to_params(), MappingProxyType(TICKET.to_params())):
        assert read_ticket(ticket, 6) == TICKET
        with pytest.raises(RequestError, match=r"^ticket: 6 block ids in all, at most 5 \(limits.block_ids_max\)$"):
            read_ticket(ticket, 5)
    params = with_value(path, Unread(range(1000)))
    with pytest.raises(
        RequestError, match=r"^ticket: 100[036] block ids in all, at most 999 \(limits.block_ids_max\)$"
    ):
        read_ticket(params, 999)


def test_too_many_ranks_are_refused_before_they_are_read() -> None:
    params = with_value("kvflow.ranks", Unread(_PARAMS["kvflow"]["ranks"][:1] * 1025))
    with pytest.raises(RequestError, match="names 1025 ranks, expected 1 to 1024"):
        Ticket.from_params(params)


@each("path", ["", "kvflow.", "kvflow.ranks.1."])
def test_routers_may_add_fields_but_not_any_number(path: str) -> None:
    params = TICKET.to_params()
    where, _ = where_of(params, f"{path}added")
    where |= {f"added {at}": at for at in range(100)}
    assert Ticket.from_params(params) == TICKET
    where |= {f"added {at}": at for at in range(300)}
    with pytest.raises(RequestError, match=r"^ticket: 3\d\d fields in one dict, at most 256$"):
        Ticket.from_params(params)


def test_a_rank_is_named_once() -> None:
    with pytest.raises(RequestError, match=r"^ticket: ranks: 3, but only 2 are different$"):
        with_changes(TICKET, ranks=(FIRST, SECOND, FIRST))


def test_ranks_of_large_tickets_are_looked_through_once() -> None:
    class Counted(tuple[RankLease, ...]):
        passes = 0

        def __iter__(self) -> Any:
            Counted.passes += 1
            return super().__iter__()

    ranks = Counted(replace(FIRST, pp_rank=at // 32, tp_rank=at % 32) for at in range(1024))
    ticket = replace(TICKET, tp_size=32, pp_size=32, ranks=ranks)
    Counted.passes = 0
    assert [ticket.find(Rank(4, at // 32, at % 32)) for at in range(1024)] == list(tuple.__iter__(ranks))
    assert Counted.passes <= 2, "once for their places, once for them"


@each(
    ("path", "value", "shown"),
    [
        ("kvflow.num_tokens", float("nan"), "num_tokens`, got nan$"),
        ("kvflow.ranks.1.port", "x" * 10_000, r"ranks\[1\]\.port`, got 'x{30}.*\.\.\..*'; a number is written without"),
        ("remote_block_ids", [1, None], r"remote_block_ids\[1\]`, got None$"),
    ],
)
def test_a_value_of_the_wrong_type_is_shown(path: str, value: object, shown: str) -> None:
    with pytest.raises(RequestError, match=shown):
        Ticket.from_params(with_value(path, value))


def test_who_passes_another_dict_is_told_which_one_to_pass() -> None:
    with pytest.raises(RequestError, match=r"do_remote_prefill`, got {'x': 1}; expected a dict of `lease.ticket"):
        Ticket.from_params({"x": 1})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@examples(200, 1000)
@given(path=st.sampled_from([*REQUIRED, "kvflow.ranks.0.block_ids", *BLOCK_IDS]), value=JSON)
@example(path="remote_engine_id", value="\ud800")
@example(path="kvflow.num_tokens", value=2**64)
@example(path="kvflow.dp_rank", value=2**64)
@example(path="remote_block_ids", value=[2**64, 1, 2])
@example(path="kvflow.block_size", value=2**63 - 1)
def test_whatever_a_router_puts_into_a_field_is_a_request_error_or_a_usable_ticket(path: str, value: object) -> None:
    params = with_value(path, value)
    assume(json.dumps(params) != json.dumps(TICKET.to_params()))
    try:
        ticket = Ticket.from_params(params)
    except RequestError:
        return
    assert after_json(ticket) == ticket
    target = Address(ticket.engine_id, Rank(ticket.dp_rank, ticket.first.pp_rank, ticket.first.tp_rank), ticket.address)
    codec.encode(messages.MetadataRequest(reader="r", target=target))
    digest = messages.digest_of(ticket.block_ids)
    of_request = {"request_id": ticket.request_id, "num_tokens": ticket.num_tokens, "blocks_digest": digest}
    codec.encode(messages.LeaseRequest(reader="r", target=target, **of_request))
    for lease in ticket.ranks:
        codec.encode(ReadDone(lease_ids=(lease.lease_id,), reader="r", numerator=1, denominator=1))
        assert 0 < lease.port < 65536
        assert len(bytes.fromhex(lease.lease_id)) == (16 if lease.lease_id else 0)
        assert ticket.find(Rank(ticket.dp_rank, lease.pp_rank, lease.tp_rank)) is not None


# --- which ranks, and where they listen


@each("fixed_ports", [False, True])
def test_a_named_rank_is_where_the_ticket_says(fixed_ports: bool) -> None:
    ticket = replace(TICKET, fixed_ports=fixed_ports)
    assert [ticket.find(Rank(4, pp, tp)) for pp in (0, 1) for tp in (0, 1)] == [None, FIRST, SECOND, None]
    assert [ticket.address_of(Rank(4, 0, 1)), ticket.address_of(Rank(4, 1, 0))] == [FIRST.address, SECOND.address]


@each(("tp_size", "pp_size"), [(1, 1), (4, 1), (1, 3), (2, 3)])
@each("dp_rank", [0, 1, 5])
def test_fixed_ports_are_those_that_the_ranks_listen_at(tp_size: int, pp_size: int, dp_rank: int) -> None:
    """Worked out from any rank's ticket, for any other rank of the same replica."""
    cut = {"tp_size": tp_size, "pp_size": pp_size, "dp_rank": dp_rank}
    ports = {
        (pp, tp): Config(engine_id="e", **cut, listen="tcp://h:5600", tp_rank=tp, pp_rank=pp).listen_port
        for pp, tp in itertools.product(range(pp_size), range(tp_size))
    }
    for (pp, tp), port in ports.items():
        ticket = replace(TICKET, **cut, ranks=(replace(FIRST, pp_rank=pp, tp_rank=tp, host="h", port=port),))
        found = {place: ticket.address_of(Rank(dp_rank, *place)) for place in ports}
        assert found == {place: f"tcp://h:{ports[place]}" for place in ports}


def test_the_offset_of_a_rank() -> None:
    places = [(0, 0, 3), (0, 1, 0), (1, 0, 0), (2, 1, 3)]
    assert [rank_offset(*place, tp_size=4, pp_size=2) for place in places] == [3, 4, 8, 16 + 4 + 3]


def test_a_rank_on_a_port_of_the_systems_choice_has_to_be_named() -> None:
    with pytest.raises(RequestError) as caught:
        replace(TICKET, fixed_ports=False).address_of(Rank(4, 2, 1))
    assert str(caught.value) == (
        "ticket: engine 'prefill-0' has ranks on ports of the system's choice (listen port 0), and (pp_rank, tp_rank) "
        "(2, 1) is needed, but the ticket names only (0, 1), (1, 0): merge the ranks' tickets"
    )


@each(("port", "rank"), [(1, Rank(4, 0, 0)), (65535, Rank(4, 2, 1))])
def test_a_rank_that_would_listen_at_no_port_is_refused(port: int, rank: Rank) -> None:
    """The first rank's port is a router's to change; the other ranks' ports follow from it, and must be ports, too."""
    ticket = replace(TICKET, ranks=(replace(FIRST, port=port),))
    with pytest.raises(RequestError, match=rf"^ticket: remote_port {port} .*not in 1\.\.65535"):
        ticket.address_of(rank)


def test_a_ticket_says_how_its_engine_is_cut_in_the_words_of_a_cache_share() -> None:
    cache_share = replace(SHARE, tp_size=2, pp_size=3, kv_heads=8, model_kv_heads=16, block_size=16)
    assert TICKET.parallelism == parallelism_of((cache_share,))
    (kind,) = TICKET.parallelism.kinds
    assert {name: getattr(cache_share, name) for name in kind} == kind


# --- merging


def ticket_of(rank: RankLease, **changes: Any) -> Ticket:
    return replace(TICKET, ranks=(rank,), **changes)


def test_a_merged_ticket_names_all_ranks_in_order() -> None:
    merged = merge_tickets([ticket_of(FIRST), ticket_of(SECOND)])
    assert merged == merge_tickets([TICKET]) == merge_tickets([TICKET, TICKET]) == TICKET
    assert merge_tickets([ticket_of(SECOND), ticket_of(FIRST)]).ranks == (SECOND, FIRST)
    third = replace(FIRST, tp_rank=0, lease_id="ab" * 16, port=5600)
    assert merge_tickets([merged, ticket_of(third)]).ranks == (FIRST, SECOND, third)


@each("ttls", [(30.0, 4.0), (4.0, 30.0)])
def test_a_merged_ticket_lives_as_long_as_the_first_of_its_leases(ttls: tuple[float, float]) -> None:
    assert merge_tickets([ticket_of(FIRST, ttl_s=ttls[0]), ticket_of(SECOND, ttl_s=ttls[1])]).ttl_s == 4.0


def test_what_cannot_be_merged_is_named() -> None:
    with pytest.raises(RequestError, match=r"^merge_tickets: .*at least one"):
        merge_tickets([])
    with pytest.raises(RequestError, match=r"^merge_tickets: two leases of \(pp_rank, tp_rank\) \(0, 1\): seal_index"):
        merge_tickets([ticket_of(FIRST), ticket_of(replace(FIRST, seal_index=18))])
    with pytest.raises(RequestError, match=r"^merge_tickets: block_ids: ") as caught:
        merge_tickets([ticket_of(FIRST, block_ids=tuple(range(100_000))), ticket_of(SECOND)])
    assert len(str(caught.value)) < 300
    ranks = [replace(FIRST, tp_rank=tp, pp_rank=pp) for tp in range(64) for pp in range(17)]
    tickets = [replace(TICKET, tp_size=64, pp_size=17, ranks=(rank,)) for rank in ranks]
    assert len(merge_tickets(tickets[:1024]).ranks) == 1024
    with pytest.raises(RequestError, match="1088 tickets, but an engine has at most 1024 ranks"):
        merge_tickets(tickets)


MAY_DIFFER = {"ranks", "ttl_s", "traceparent", "more_block_ids", "awaited"}
OTHERS: dict[str, Any] = {
    "groups": (GroupFacts(name="local", block_size=16, kind=GroupKind.SLIDING, window=8),),
    "more_kinds": ((16, 4, 8),),
}
for of_ticket in sorted(set(Ticket.__struct_fields__) - MAY_DIFFER - OTHERS.keys()):
    value = getattr(TICKET, of_ticket)
    OTHERS[of_ticket] = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value[::-1]


@each("name", OTHERS)
@each("at", [1, 2])
def test_tickets_of_different_requests_or_engines_are_not_merged(name: str, at: int) -> None:
    found = [ticket_of(FIRST), ticket_of(SECOND), ticket_of(SECOND)]
    found[at] = ticket_of(SECOND, **{name: OTHERS[name]})
    with pytest.raises(RequestError) as caught:
        merge_tickets(found)
    both = f"{str(getattr(TICKET, name))[:80]} and {str(OTHERS[name])[:80]}"
    expected = "expected tickets that the ranks of one engine made for one request"
    expected += "; give all ranks of an engine one Config.engine_id" if name == "engine_id" else ""
    assert str(caught.value) == f"merge_tickets: {name}: {both}: {expected}"


def test_a_ticket_without_leases_names_the_ranks_to_ask() -> None:
    ticket = TICKET.without_leases(request_id="other", block_ids=[4], num_tokens=3, ttl_s=2.0)
    assert (ticket.request_id, ticket.block_ids, ticket.num_tokens, ticket.ttl_s) == ("other", (4,), 3, 2.0)
    assert (ticket.engine_id, ticket.parallelism) == (TICKET.engine_id, TICKET.parallelism)
    for rank, original in zip(ticket.ranks, TICKET.ranks, strict=True):
        assert (rank.lease_id, rank.seal_index, rank.block_ids) == ("", 0, None)
        assert (rank.address, rank.incarnation) == (original.address, original.incarnation)
    assert after_json(ticket) == ticket


# --- several groups

FULL = GroupFacts(name="full", block_size=16)
GROUPED = replace(
    TICKET,
    more_block_ids=((40, 41),),
    groups=(FULL, GroupFacts(name="local", block_size=16, kind=GroupKind.SLIDING, window=20)),
    more_kinds=((16, 4, 8),),
    ranks=(FIRST, replace(SECOND, more_block_ids=((0, 9),))),
)


def test_block_ids_of_several_groups_are_nested_as_others_of_this_field_do_it() -> None:
    params = GROUPED.to_params()
    assert params["remote_block_ids"] == [[3, 7, 9], [40, 41]]
    assert params["kvflow"]["groups"][1] == {"name": "local", "block_size": 16, "kind": "sliding", "window": 20}
    assert after_json(GROUPED) == GROUPED == read_ticket(GROUPED)
    assert GROUPED.block_tables == ((3, 7, 9), (40, 41))
    assert GROUPED.ranks[1].block_tables == ((30, 70, 90), (0, 9))
    kind = {"tp_size": 2, "pp_size": 3, "block_size": 16, "kv_heads": 4, "model_kv_heads": 8, "sharded": False}
    assert [*GROUPED.parallelism.kinds][1] == kind


def test_how_far_a_prompt_is_offered_is_said_by_groups_that_hold_its_beginning() -> None:
    assert GROUPED.offered_tokens == 41
    assert replace(GROUPED, num_tokens=60).offered_tokens == 48
    assert replace(GROUPED, block_ids=(), more_block_ids=((),), ranks=(FIRST,)).offered_tokens == 0
    only = replace(TICKET, groups=GROUPED.groups[1:], block_ids=(40, 41), ranks=(FIRST,))
    assert only.offered_tokens == 41, "a window says nothing of it"


CHUNKED = GroupKind.CHUNKED
SHARDS = GroupFacts(name="kv", block_size=32, kind=GroupKind.SHARDED)


def test_sharded_tokens_are_a_kind_of_group_that_earlier_versions_refuse_by_name() -> None:
    """As this version refuses a kind that it does not know."""
    ticket = replace(TICKET, block_size=32, groups=(SHARDS,))
    params = ticket.to_params()
    assert params["kvflow"]["groups"] == [{"name": "kv", "block_size": 32, "kind": "sharded"}]
    assert after_json(ticket) == ticket
    assert (ticket.parallelism.sharded, ticket.offered_tokens) == (True, 41)
    assert not TICKET.parallelism.sharded
    params["kvflow"]["groups"][0]["kind"] = "unheard of"
    with pytest.raises(RequestError, match=r"Invalid enum value 'unheard of' - at `\$.kvflow.groups"):
        Ticket.from_params(params)


@each(
    ("changes", "problem"),
    [
        ({"groups": ()}, "0 groups, but 2 block tables"),
        ({"more_block_ids": ()}, "2 groups, but 1 block table"),
        ({"more_block_ids": ((1,), (2,))}, "2 groups, but 3 block tables"),
        ({"more_block_ids": ((40, 41, 42),)}, r"blocks by group: \(3, 3\), but \(3, 2\) of tp_rank 0"),
        ({"block_size": 8}, "block_size 8, but 16 of the first group"),
        ({"groups": (FULL, {"name": "a b", "block_size": 16})}, "group 'a b'"),
        ({"groups": (FULL, {"name": "b", "block_size": 0})}, "block_size 0"),
        ({"groups": (FULL, {"name": "b", "block_size": 2**70})}, "block_size"),
        ({"groups": (FULL, {"name": "b", "block_size": 16, "window": 4})}, "kind full, window 4"),
        ({"groups": (FULL, {"name": "b", "block_size": 16, "kind": "chunked"})}, "kind chunked, window 0"),
        ({"more_kinds": ((16, 0, 8),)}, "more_kinds"),
        ({"groups": (FULL, {"name": "b", "block_size": 16, "kind": "sharded"})}, "sharded tokens: 1 of 2, block sizes"),
        (
            {"block_size": 15, "groups": [{"name": name, "block_size": 15, "kind": "sharded"} for name in "ab"]},
            r"sharded tokens: 2 of 2, block sizes \[15, 15, 16\] on 2 ranks",
        ),
        (
            {
                "groups": [{"name": name, "block_size": 16, "kind": "sharded"} for name in "ab"],
                "more_kinds": ((1, 4, 8),),
            },
            r"sharded tokens: 2 of 2, block sizes \[16, 16, 1\] on 2 ranks",
        ),
    ],
)
def test_groups_that_cannot_be_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        with_changes(GROUPED, **changes)
    params, values = GROUPED.to_params(), to_builtins(changes)
    if "more_block_ids" in values:
        params["remote_block_ids"][1:] = values.pop("more_block_ids")
    with pytest.raises(RequestError, match=problem):
        Ticket.from_params({**params, "kvflow": params["kvflow"] | values})


@each("tables", [[[1], [2] * 1000], [[2] * 1000, []]])
def test_a_million_ids_in_groups_are_refused_before_they_are_read(tables: list[list[int]]) -> None:
    made = with_changes(GROUPED, more_block_ids=((1,) * 1000,), ranks=(FIRST,))
    for ticket in ({**GROUPED.to_params(), "remote_block_ids": tables}, made):
        with pytest.raises(RequestError, match=r"100. block ids in all, at most 100"):
            read_ticket(ticket, 100)


def test_a_ticket_without_leases_has_a_table_for_each_group() -> None:
    other: dict[str, Any] = {"request_id": "other", "num_tokens": 3, "ttl_s": 2.0}
    ticket = GROUPED.without_leases(block_ids=[[4], [5]], **other)
    assert (ticket.block_tables, ticket.ranks[1].block_tables) == (((4,), (5,)), ())
    with pytest.raises(RequestError, match="1 block table, but 2 groups"):
        GROUPED.without_leases(block_ids=[[4]], **other)


# --- blocks that are to come


def test_a_ticket_says_that_blocks_follow() -> None:
    ticket = replace(TICKET, extends=True, num_tokens=64, block_ids=(3,), ranks=(FIRST,))
    assert ticket.to_params()["kvflow"]["extends"] is True
    assert after_json(ticket) == ticket
    assert (ticket.block_counts, ticket.offered_tokens) == ((64 // TICKET.block_size,), 64)
    assert "extends" not in TICKET.to_params()["kvflow"]


@each(
    ["changes", "problem"],
    [
        ({"extends": True, "num_tokens": 1}, "num_tokens 1 needs"),
        # Blocks to come are not listed: their number alone is judged, before anything is made of it.
        ({"extends": True, "num_tokens": 1 << 60}, r"at most 1000 \(limits.block_ids_max\)"),
        ({"extends": 1}, "extends"),
        ({"awaited": True}, "a pending ticket has no blocks"),
        ({"awaited": "yes"}, "awaited"),
    ],
)
def test_what_is_to_come_has_to_be_possible(changes: dict[str, Any], problem: str) -> None:
    params = TICKET.to_params()
    params["kvflow"].update(changes)
    with pytest.raises(RequestError, match=problem):
        read_ticket(params, 1000)


def test_the_blocks_of_windows_and_states_in_the_end() -> None:
    groups = (
        GroupFacts(name="all", block_size=4),
        GroupFacts(name="window", block_size=4, kind=GroupKind.SLIDING, window=6),
        GroupFacts(name="state", block_size=1, kind=GroupKind.STATE),
    )
    assert [[group.blocks_needed(tokens) for group in groups] for tokens in (18, 0)] == [[5, 2, 1], [0, 0, 0]]
    held = {(0, 0, 0): 0, (2, 0, 0): 8, (5, 0, 0): 12, (5, 1, 0): 16, (5, 2, 0): 17, (5, 2, 1): 18}
    assert {known: tokens_held(groups, known, (5, 2, 1), 18) for known in held} == held


# --- changed in transit, or mixed from several


NOT_DIGESTED = {"do_remote_prefill", "do_remote_decode", "remote_host", "remote_port", "kvflow", "ranks", "version"}
NOT_DIGESTED |= {"ttl_s", "fixed_ports", "traceparent", "host", "port", "digest", "remote_engine_id"}
"""The engine and its address, which its ranks confirm; times and traces; and fields that are checked elsewhere."""
OTHER_VALUES: dict[type, Any] = {int: lambda one: one + 1, bool: lambda one: not one, list: lambda one: [*one[:-1], 1]}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a ticket's dict, a list of numbers being one."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items or (isinstance(value, list) and value and not isinstance(value[0], dict | list)):
        yield path
        return
    for key, one in items:
        yield from leaves(one, (*path, key))


def with_other(params: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any] | None:
    """Return a copy with another value of the same type at `path`, or None if there is no other value."""
    found = json.loads(json.dumps(params))
    *parents, name = path
    where = found
    for key in parents:
        where = where[key]
    value = where[name]
    if isinstance(value, str) and value:
        where[name] = value[:-1] + ("0" if value[-1] != "0" else "1")
    elif isinstance(value, float):
        where[name] = value + 1.0
    elif value or isinstance(value, bool | int):
        where[name] = OTHER_VALUES[type(value)](value)
    return found if where[name] != value else None


EVERYTHING = replace(
    TICKET,
    ranks=(replace(FIRST, pending=True, payload=True, held=False), SECOND),
    more_kinds=((16, 4, 8),),
    extends=True,
)


@each("ticket", [TICKET, EVERYTHING])
def test_whatever_a_reader_relies_on_is_refused_once_it_is_another(ticket: Ticket) -> None:
    params = ticket.to_params()
    seen = set()
    for path in leaves(params):
        other = with_other(params, path)
        if other is None:
            continue
        key = next(name for name in reversed(path) if isinstance(name, str))
        seen.add(key)
        if key in NOT_DIGESTED:
            continue
        with pytest.raises(RequestError, match=r"^ticket: "):
            Ticket.from_params(other)
    digested = {"remote_block_ids", "num_tokens", "prompt_digest", "lease_id", "seal_index", "block_size", "kv_heads"}
    assert digested < seen


@each(
    ("path", "value", "part"),
    [
        ("remote_block_ids", [3, 7, 12], "block ids"),
        ("remote_block_ids", [7, 3, 9], "block ids"),
        ("kvflow.ranks.1.block_ids", [30, 70, 12], "block ids"),
        ("kvflow.num_tokens", 40, "tokens or prompt"),
        ("kvflow.prompt_digest", "", "tokens or prompt"),
        ("remote_request_id", "req-2", "request, ranks or lease"),
        ("kvflow.ranks.0.held", False, "request, ranks or lease"),
        ("kvflow.ranks.0.pending", True, "request, ranks or lease"),
    ],
)
def test_the_error_names_the_part_that_was_changed(path: str, value: object, part: str) -> None:
    with pytest.raises(RequestError, match=rf"several tickets: {part}: digest ours \w{{8}}, theirs \w{{8}}$"):
        Ticket.from_params(with_value(path, value))


def test_parts_of_two_good_tickets_are_no_ticket() -> None:
    """Of the same engine and request: another lease, other blocks, as many."""
    again = replace(TICKET, block_ids=(4, 8, 10), ranks=(replace(FIRST, lease_id="ab" * 16, seal_index=18), SECOND))
    one, other = TICKET.to_params(), again.to_params()
    ranks = [one["kvflow"]["ranks"][0], other["kvflow"]["ranks"][1]]
    for mixed in (
        {**one, "remote_block_ids": other["remote_block_ids"]},
        {**one, "kvflow": other["kvflow"]},
        {**one, "kvflow": {**one["kvflow"], "ranks": other["kvflow"]["ranks"]}},
        {**one, "kvflow": {**one["kvflow"], "ranks": ranks}},
    ):
        with pytest.raises(RequestError, match="mixed from several"):
            Ticket.from_params(mixed)


def test_each_rank_answers_for_itself() -> None:
    """A dict of some ranks is a ticket of these ranks. Ranks without digests come from a version without digests."""
    params = TICKET.to_params()
    params["kvflow"]["ranks"].pop()
    assert Ticket.from_params(params) == replace(TICKET, ranks=(FIRST,))
    for rank in (params := with_value("remote_block_ids", [3, 7, 12]))["kvflow"]["ranks"]:
        del rank["digest"]
    assert Ticket.from_params(params).block_ids == (3, 7, 12)
    params = with_value("remote_block_ids", [3, 7, 12])
    del params["kvflow"]["ranks"][0]["digest"]
    with pytest.raises(RequestError, match=r"\(pp_rank, tp_rank\) \(1, 0\).* block ids"):
        Ticket.from_params(params)


def test_tickets_without_leases_have_digests_too() -> None:
    """The maker of the dict vouches for it: a router's rendezvous, or a scheduler that has no lease."""
    asked = TICKET.without_leases(request_id="other", block_ids=(3, 7), num_tokens=32, ttl_s=9.0)
    for ticket in (asked, Ticket.rendezvous(TICKET, "secret")):
        assert after_json(ticket) == ticket
        for changes in ({"remote_block_ids": [3, 12]}, {"remote_request_id": "another"}):
            with pytest.raises(RequestError, match=r"mixed from several|pending ticket has no blocks"):
                Ticket.from_params({**ticket.to_params(), **changes})
