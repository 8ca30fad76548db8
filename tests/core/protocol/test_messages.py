"""Messages: encoded messages can be decoded, and wrong ones are refused without an effect."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import inspect
from msgspec.structs import replace

from kvflow.core.bounds import NO_LEASE_ID
from kvflow.core.cache.groups import GroupFacts
from kvflow.core.cache.layout import BlockShape
from kvflow.core.plan.topology import CacheShare, Rank
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import Address, agent_name
from kvflow.core.protocol.compatibility import Compatibility
from kvflow.core.protocol.notifications import Notification, ReadDone, Renew, join_read_done, leases_max
from kvflow.core.protocol.rank_lease import RankLease
from tests.core.claimed import HOLDING, REGIONS, sent
from tests.support.budgets import examples
from tests.support.tests_support import each, unchecked

LEASE_ID = "0123456789abcdef0123456789abcdef"
FACTS = Compatibility(model="llama", dtype="bfloat16", kv_format="plain", attention="K and V", head_size="128")
METADATA = messages.Metadata(
    engine_id="prefill-0",
    incarnation="8f14e45fceea167a",
    cache_shares=(HOLDING,),
    agent_metadata=b"\x00agent\xff",
    agent_metadata_crc32=7,
    regions=(REGIONS,),
    groups=(GroupFacts(name="kv", block_size=4),),
    seals=messages.SealLocation(address=4096, count=16, hold_s=0.02),
    staged=False,
)
READER, INCARNATION = "decode-0/0.0.0#1", "8f14e45f"
ASKED: dict[str, Any] = {"reader": READER, "target": Address("prefill-0", Rank(0, 2, 1), "tcp://host:5603")}
OF_REQUEST = {"request_id": "req-1", "num_tokens": 41, "blocks_digest": messages.digest_of((3, 7))}
OF_LEASE = {"request_id": "req", "lease_id": LEASE_ID}
REQUEST = messages.MetadataRequest(**ASKED)
RELEASE = messages.ReleaseRequest(**ASKED, lease_id=LEASE_ID, cache_shares=(HOLDING,))
LEASE = RankLease(
    pp_rank=2, tp_rank=1, incarnation=INCARNATION, lease_id=LEASE_ID, seal_index=17, host="10.0.0.7", port=9000
)
FOUND = messages.LeaseAnswer(state=messages.LeaseAnswerState.OPEN, lease=LEASE)
NEWS_QUESTION = messages.LeaseRequest(**ASKED, **OF_LEASE, known=(3, 0), wait_s=9.5)
OFFER = messages.Offer(num_tokens=41, ttl_s=30.0, block_ids=((3, 7), (5,)), extends=True, prompt_digest="0" * 32)
OFFERED = replace(FOUND, offer=OFFER)
DECODERS: dict[str, tuple[Callable[[bytes], object], list[msgspec.Struct]]] = {
    "header": (codec.decode_header, [codec.our_header(b""), codec.our_header(FACTS.fingerprint())]),
    "request": (
        codec.decode_request,
        [
            REQUEST,
            messages.LeaseRequest(**ASKED, **OF_REQUEST),
            RELEASE,
            messages.LeaseRequest(**ASKED, request_id="secret", wait_s=9.5),
            NEWS_QUESTION,
            replace(NEWS_QUESTION, known=()),
        ],
    ),
    "reply": (
        codec.decode_reply,
        [
            METADATA,
            replace(METADATA, staged=True),
            FOUND,
            replace(FOUND, lease=replace(LEASE, block_ids=(3, 1))),
            OFFERED,
            messages.LeaseAnswer(state=messages.LeaseAnswerState.COMPLETE, offer=replace(OFFER, block_ids=())),
            messages.LeaseAnswer(state=messages.LeaseAnswerState.FAILED, reason="no room"),
            messages.LeaseAnswer(
                state=messages.LeaseAnswerState.FAILED, reason="it came to another engine", instead=b"\x80"
            ),
            messages.Ack(incarnation=INCARNATION),
            messages.LeaseAnswer(state=messages.LeaseAnswerState.OPEN, more_block_ids=((3,), ())),
            messages.LeaseAnswer(state=messages.LeaseAnswerState.COMPLETE, payload=b"\x00token"),
            messages.LeaseAnswer(state=messages.LeaseAnswerState.ENDED),
            messages.LeaseAnswer(state=messages.LeaseAnswerState.WAITING),
            messages.Refusal(reason="another engine", version=1, listens=ASKED["target"]),
            messages.Refusal(reason="no such rank", version=1),
            messages.Refusal(reason="differs", version=1, compatibility=FACTS, cache_shares=(HOLDING,)),
        ],
    ),
    "notification": (
        codec.decode_notification,
        [
            ReadDone(lease_ids=(LEASE_ID,), reader=READER, numerator=2, denominator=64),
            Renew(lease_ids=(), reader=READER),
            Renew(lease_ids=(LEASE_ID, LEASE_ID[::-1]), reader=READER),
        ],
    ),
}


# --- messages


def test_peers_without_mapped_memory_understand_those_with_it() -> None:
    """And the other way round: its fields are newer than the protocol's number."""
    newer = {"device_memory", "device_memory_crc32"}
    fields = [(one.name, one.type) for one in msgspec.structs.fields(METADATA) if one.name not in newer]
    older = msgspec.defstruct("Metadata", fields, tag="metadata", frozen=True, kw_only=True)
    sent_now = codec.encode(replace(METADATA, device_memory=b"handles", device_memory_crc32=5))
    read_then = msgspec.msgpack.decode(sent_now, type=older)
    assert msgspec.structs.asdict(read_then) == {name: getattr(METADATA, name) for name, _ in fields}
    assert codec.decode_reply(codec.encode(read_then)) == METADATA


def test_a_goodbye_with_a_successor_is_understood_by_peers_that_know_none() -> None:
    """And the other way round."""
    place = Address("engine", Rank(0, 0, 0), "tcp://127.0.0.1:1")
    goodbye = messages.Goodbye(target=place, sender=place, incarnation="0")
    fields = [(one.name, one.type) for one in msgspec.structs.fields(goodbye) if one.name != "successor"]
    older = msgspec.defstruct("Goodbye", fields, tag="goodbye", frozen=True, kw_only=True)
    successor = Address("other", Rank(0, 0, 1), "tcp://127.0.0.1:2")
    sent_now = codec.encode(replace(goodbye, successor=successor))
    assert codec.decode_request(sent_now) == replace(goodbye, successor=successor)
    read_then = msgspec.msgpack.decode(sent_now, type=older)
    assert msgspec.structs.asdict(read_then) == {name: getattr(goodbye, name) for name, _ in fields}
    assert codec.decode_request(codec.encode(read_then)) == goodbye


@each(("kind", "sent_as"), itertools.product(DECODERS, repeat=2))
def test_messages_survive_the_wire_and_are_of_one_kind(kind: str, sent_as: str) -> None:
    decode, _ = DECODERS[kind]
    for message in DECODERS[sent_as][1]:
        if kind == sent_as:
            assert decode(codec.encode(message)) == message
        else:
            with pytest.raises(codec.WireError):
                decode(codec.encode(message))


def test_frames_are_a_header_and_a_body() -> None:
    header, body = codec.encode_frames(codec.our_header(b"f" * 16), REQUEST)
    assert codec.decode_header(header) == codec.Header(
        magic="kvflow", version=codec.PROTOCOL_VERSION, fingerprint=b"f" * 16
    )
    assert codec.decode_request(body) == REQUEST


@each(
    ("frame", "fields"),
    [
        (["kvflow", 9, b""], (9, b"", 0)),  # a newer peer can be told which version we speak
        (["kvflow", 9, b"f", 7, 8, {"new": "field"}], (9, b"f", 7, 8)),
        (["kvflow", 9], None),
        (["kvfl0w", 1, b""], None),
        (["", 1, b""], None),
        (["kvflow", 1, b"x" * 65], None),
    ],
)
def test_a_header_of_any_version_is_read_and_none_that_is_not_ours(
    frame: list[object], fields: tuple[int, bytes, int] | tuple[int, bytes, int, int] | None
) -> None:
    """It may leave out which question it is of."""
    if fields is not None:
        assert codec.decode_header(msgspec.msgpack.encode(frame)) == codec.Header("kvflow", *fields)
        return
    with pytest.raises(codec.WireError):
        codec.decode_header(msgspec.msgpack.encode(frame))


NAMES = ["type", "engine_id", "regions", "seals", "reason", "version", "state", "lease_id", "target", "cache_shares"]
TAGS = ["kvflow", "get_metadata", "get_lease", "metadata", "lease", "ended", "refusal", "read_done", LEASE_ID]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=6)
    | st.sampled_from(TAGS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=8,
)


ENCODED = [codec.encode(message) for _, examples in DECODERS.values() for message in examples]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    payload = bytearray(draw(st.sampled_from(ENCODED)))
    for _ in range(draw(st.integers(1, 3))):
        position = draw(st.integers(0, len(payload) - 1))
        match draw(st.sampled_from(["flip", "insert", "cut"])):
            case "flip":
                payload[position] = draw(st.integers(0, 255))
            case "insert":
                payload[position:position] = draw(st.binary(min_size=1, max_size=6))
            case "cut":
                del payload[position + 1 :]
    return bytes(payload)


@examples(500, 3800)
@given(payload=st.binary(max_size=80) | VALUES.map(msgspec.msgpack.encode) | damaged())
@example(payload=b"")
@example(payload=b"\xc1")
@example(payload=b"\x91" * 100_000)
@example(payload=b"\x81\xa1a" * 100_000)
@example(payload=b"\x82\xa4type\xa8metadata\xa1x" + b"\x91" * 100_000)
@example(payload=b"\x84" + b"\xa6reason\x90" * 4)
@example(payload=b"\xdd\xff\xff\xff\xff")
@example(payload=b"\xdf\xff\xff\xff\xff")
@example(payload=b"\xc6\xff\xff\xff\xff")
def test_whatever_comes_is_a_message_of_its_kind_or_a_wire_error(payload: bytes) -> None:
    """A second pass agrees with the first."""
    for decode, samples in DECODERS.values():
        try:
            message = decode(payload)
        except codec.WireError:
            continue
        assert isinstance(message, tuple({type(known) for known in samples}))
        assert decode(codec.encode(message)) == message


@each(
    ("path", "value"),
    [
        ("engine_id", b"prefill-0"),
        ("cache_shares.0.tp_rank", True),
        ("cache_shares.0.tp_rank", 0.0),
        ("cache_shares.0.layers", [7, "8"]),
        ("regions.0.block", [4, 2, 8, 16]),
        ("regions.0.block", [4, 2, 8, 16, 8, 1]),
        ("seals", None),
        ("staged", 1),
    ],
)
def test_decoding_does_not_convert(path: str, value: object) -> None:
    raw = where = msgspec.to_builtins(METADATA, builtin_types=(bytes,))
    *parents, field = path.split(".")
    for parent in parents:
        where = where[int(parent) if parent.isdigit() else parent]
    where[field] = value
    with pytest.raises(codec.WireError, match=field):
        codec.decode_reply(msgspec.msgpack.encode(raw))


@given(reader=st.text(max_size=300), bytes_max=st.integers(1, 1 << 17))
def test_as_many_renewals_as_fit_into_a_notification(reader: str, bytes_max: int) -> None:
    count = leases_max(reader, bytes_max)
    size = len(codec.encode(Renew(lease_ids=(LEASE_ID,) * count, reader=reader)))
    assert count == 1 or size <= bytes_max
    done = ReadDone(lease_ids=(LEASE_ID,) * (count + 2), reader=reader, numerator=1 << 31, denominator=1 << 31)
    assert len(codec.encode(done)) > bytes_max


def test_what_many_readers_tell_is_joined() -> None:
    def done(lease_ids: str, numerator: int = 1) -> bytes:
        return codec.encode(ReadDone(tuple(lease_ids), "reader", numerator, 2))

    told = join_read_done([done("a"), done("b", 2), done("cd"), done("e")], lease_ids_max=3)
    assert told == [done("acd"), done("e"), done("b", 2)]


def unbounded(kind: Any, place: str, seen: set[type]) -> Iterator[str]:
    """The places in a type where a number, text or list of any size fits."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            if (kind.ge is None and kind.gt is None) or (kind.le is None and kind.lt is None):
                yield place
        case inspect.StrType() | inspect.BytesType():
            if kind.max_length is None:
                yield place
        case inspect.ListType() | inspect.VarTupleType():
            if kind.max_length is None:
                yield place
            yield from unbounded(kind.item_type, place + "[]", seen)
        case inspect.UnionType():
            for one in kind.types:
                yield from unbounded(one, place, seen)
        case inspect.StructType() | inspect.NamedTupleType():
            if kind.cls not in seen:
                seen.add(kind.cls)
                for field in kind.fields:
                    yield from unbounded(field.type, f"{kind.cls.__name__}.{field.name}", seen)
        case inspect.BoolType() | inspect.EnumType() | inspect.NoneType():
            pass
        case _:
            yield f"{place}: {kind}"


def test_every_field_of_every_message_has_bounds() -> None:
    """So whatever is decoded is of a size, in a range."""
    seen: set[type] = set()
    for kind in (codec.Header, messages.CoreRequest, messages.CoreReply, Notification):
        assert [*unbounded(inspect.type_info(kind), "", seen)] == []
    assert {type(message) for _, samples in DECODERS.values() for message in samples} <= seen
    assert {GroupFacts, CacheShare, BlockShape} <= seen


HOSTILE = ["x" * 200_000, "a\n2026-01-01 ERROR \x1b[2J", -1, 1 << 63, float("nan"), float("-inf"), -1e-9, True, None]
HOSTILE += [b"x" * (1 << 21), [0] * (1 << 17), [[0]] * 2000, [-1], ["x" * 200_000], [[1 << 63]], {}, 1.5]


def altered(value: Any, hostile: Any) -> Iterator[Any]:
    """Yield the message with each field in turn, and each entry of a field, replaced."""
    for key in value if isinstance(value, dict) else range(min(len(value), 8)):
        changed = value.copy()
        changed[key] = hostile
        yield changed
        if isinstance(value[key], dict | list):
            for inner in altered(value[key], hostile):
                changed = value.copy()
                changed[key] = inner
                yield changed


@each("kind", DECODERS)
def test_no_field_carries_what_could_not_be_said(kind: str) -> None:
    """Decoded messages can be encoded, compared and printed. The reason of a refusal is one line."""
    decode, samples = DECODERS[kind]
    for message in {type(sample): sample for sample in samples}.values():
        plain = msgspec.msgpack.decode(codec.encode(message))
        for hostile in HOSTILE:
            for changed in altered(plain, hostile):
                told = ""
                try:
                    found = decode(msgspec.msgpack.encode(changed))
                    assert decode(codec.encode(found)) == found
                except codec.WireError as error:
                    told = str(error)
                assert told.isprintable()
                assert len(told) < 400


ASKING = {"type": "get_metadata", "reader": "r"}
PLACE = ["e", [0, 0, 0], "tcp://host:1"]


@each(
    ("decode", "body", "told"),
    [
        (codec.decode_request, {**ASKING, "reader": "r" * 5000}, "length <= 4096 - at `$.reader`, got 'rrr"),
        (codec.decode_request, {**ASKING, "target": ["e", [0, -7, 0], ""]}, "`$.target[1][1]`, got -7"),
        (codec.decode_notification, ["read_done", ["a"], "r", -1, 2], ">= 0 - at `$[3]`, got -1"),
        (codec.decode_header, ["kvflow", -2, b""], ">= 0 - at `$[1]`, got -2"),
        # as of a reader of version 1
        (codec.decode_notification, ["read_done", LEASE_ID, "r"], "Expected `array` of at least length 5, got 3"),
        (codec.decode_notification, ["read_done", LEASE_ID, "r", True, 1], "Expected `array`"),
        (codec.decode_notification, ["renew", LEASE_ID, "r"], "Expected `array`"),
    ],
)
def test_a_refusal_names_field_bound_and_value(decode: Callable[[bytes], Any], body: object, told: str) -> None:
    with pytest.raises(codec.WireError, match=re.escape(told)):
        decode(msgspec.msgpack.encode(body))


def test_engines_speak_in_few_messages() -> None:
    """A new one takes the place of an old one. Parts have some of their own, such as `prefix.seek_request`."""
    kinds = [kind for union in (messages.CoreRequest, messages.CoreReply, Notification) for kind in get_args(union)]
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds) == 10


def test_a_refused_lease_id_is_not_repeated() -> None:
    body = {"type": "release", "reader": "r", "target": PLACE, "cache_shares": []}
    with pytest.raises(codec.WireError, match="lease_id") as caught:
        codec.decode_request(msgspec.msgpack.encode({**body, "lease_id": "5ec2e7" * 9}))
    assert "5ec2e7" not in str(caught.value)


@each("ttl_s", [float("nan"), float("inf"), float("-inf"), 0.0])
def test_no_lease_lasts_as_long(ttl_s: float) -> None:
    sent(replace(OFFERED, offer=replace(OFFER, ttl_s=1e300)))
    with pytest.raises(codec.WireError, match="ttl_s"):
        sent(replace(OFFERED, offer=replace(OFFER, ttl_s=ttl_s)))


def test_agent_names_are_different_for_every_rank_and_life() -> None:
    places = list(itertools.product("ab", range(3), range(3), range(12), "xy"))
    names = {agent_name(engine, Rank(dp, pp, tp), life) for engine, dp, pp, tp, life in places}
    assert len(names) == len(places)


@examples(60, 300)
@given(st.lists(st.lists(st.integers(0, 2**31), max_size=4).map(tuple), min_size=2, max_size=2))
@example([(1, 2), (2, 1)])
@example([(), (0,)])
@example([(1,), (1, 0)])
def test_digests_of_block_ids_are_equal_exactly_for_equal_ids(both: list[tuple[int, ...]]) -> None:
    """Ranks that hold other blocks for a request must not be read: their ids are positions in another prompt."""
    first, second = both
    assert (messages.digest_of(first) == messages.digest_of(second)) == (first == second)
    assert len(messages.digest_of(first)) == 16
    assert messages.digest_of((3, 7, 9)).hex() == "87639e90e2b29382d711298f861a9019"


@each(
    "changes",
    [
        {"lease_id": NO_LEASE_ID},
        {"lease_id": "no lease"},
        {"incarnation": "a b"},
        {"host": "of two words"},
        {"port": 0},
        {"port": 1 << 16},
        {"block_ids": (1 << 63,)},
    ],
)
def test_a_lease_that_no_rank_has_does_not_decode(changes: dict[str, Any]) -> None:
    answer = unchecked(FOUND, lease=unchecked(LEASE, **changes))
    with pytest.raises(codec.WireError, match=next(iter(changes))):
        codec.decode_reply(codec.encode(answer))
