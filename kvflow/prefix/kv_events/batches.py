"""KV events as vLLM and SGLang publish them: batches of what an engine's prefix cache has stored and removed.

A batch is msgpack: an array of time, events, and the data parallel rank. An event is a map with its class's name under
`type`, as vLLM writes since 0.26 and SGLang since 0.5.23, or an array that begins with that name, as before. In place 7
of such an array vLLM has an adapter's name, SGLang 0.5.18 to 0.5.22 a map of what are fields later. What is
absent has its default; keys and entries that are not known here are passed over, and so are events of a type or form
that is not. What a batch may cost is bounded by its bytes and by the counts below, which are judged before their
entries are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from kvflow.checks import counted, instance, printable, said
from kvflow.errors import ProtocolError, RequestError

BATCH_BYTES_MAX = 4 << 20
EVENTS_MAX, BLOCKS_MAX = 1 << 14, 1 << 16
"""Longest list of events in a batch, and of blocks in an event."""
TOKENS_MAX, BLOCK_TOKENS_MAX = 1 << 20, 1 << 16
_SAID_CHARS = 200

BlockHash: TypeAlias = int | Annotated[bytes, Meta(max_length=64)]
"""An engine's own name for a block: bytes, their low 64 bits (vLLM), or 64 bits with a sign (SGLang)."""
_Hashes: TypeAlias = Annotated[list[BlockHash], Meta(max_length=BLOCKS_MAX)]
_ExtraKeys: TypeAlias = Annotated[list[str | tuple[str, int]], Meta(max_length=1 << 10)]


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks that a prefix cache holds from now on: they follow each other, the first one follows the parent."""

    block_hashes: _Hashes
    """The engine's names for the blocks, as ints of 64 bits or bytes."""
    parent_block_hash: BlockHash | None = None
    """The name of the block before the first; None if that is a prompt's first."""
    token_ids: Annotated[list[int], Meta(max_length=TOKENS_MAX)]
    """The blocks' tokens, `block_size` for each."""
    block_size: Annotated[int, Meta(ge=1, le=BLOCK_TOKENS_MAX)]
    """Tokens of a block."""
    lora_id: int | None = None
    """An adapter's number, if the blocks were computed with one."""
    medium: str | None = None
    """Medium they are on: "GPU" is the cache that the engine computes with, also on CPU."""
    lora_name: str | None = None
    """An adapter's name."""
    extra_keys: Annotated[list[_ExtraKeys | None], Meta(max_length=BLOCKS_MAX)] | None = None
    """Further keys of the blocks, a list or None for each: a cache salt as text, a picture as (identifier, offset
    from the block's beginning)."""
    group_idx: int | None = None
    """The cache group, where a cache has several."""
    kv_cache_spec_kind: str | None = None
    """The group's kind, such as "full_attention" or "sliding_window"."""
    cache_salt: str | None = None
    """SGLang's salt of the request."""


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks that a prefix cache does not hold any more, of one medium and one group."""

    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Clearing of the whole prefix cache, or of all its blocks on one medium."""

    medium: str | None = None
    """The medium that was cleared; None if all were."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
_ARRAY_FIELDS = 10  # in which the arrays of both engines agree
_PLACES_MAX = 256
_NOT_VLLMS = {"BlockStored": ("cache_salt",), "AllBlocksCleared": ("medium",)}


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: Annotated[list[msgspec.Raw], Meta(max_length=EVENTS_MAX)]
    data_parallel_rank: int | None = None


_KINDS = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
_batch = msgspec.msgpack.Decoder(_Batch)
_event = msgspec.msgpack.Decoder(KVEvent)
_array = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=_PLACES_MAX)])
_name = msgspec.msgpack.Decoder(str)
_in_lora_name = msgspec.msgpack.Decoder(str | dict[str, msgspec.Raw] | None)
_MALFORMED = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


def decode_batch(payload: bytes, *, peer: str = "") -> Iterator[KVEvent]:
    """The events of a batch in their order, each read when it is asked for; those that are not known are left out.

    Args:
        payload: The last frame of a message.
        peer: Who has sent it, for the error.

    Returns:
        An iterator, which raises nothing.

    Raises:
        ProtocolError: The bytes are no batch, or one that is too large.
    """
    if len(payload) > BATCH_BYTES_MAX:
        raise ProtocolError(
            f"KV events from {peer or 'a publisher'}: a batch of {counted(len(payload), 'byte')}, "
            f"at most {BATCH_BYTES_MAX}",
            peer=peer,
        )
    try:
        batch = _batch.decode(payload)
    except _MALFORMED as error:
        why = f"KV events from {peer or 'a publisher'}: no batch: {printable(str(error), _SAID_CHARS)}"
        raise ProtocolError(why, peer=peer) from error
    return (event for raw in batch.events if (event := _event_of(raw)) is not None)


def _event_of(raw: msgspec.Raw) -> KVEvent | None:
    kind = memoryview(raw)[0]
    is_array = 0x90 <= kind <= 0x9F or kind in (0xDC, 0xDD)
    try:
        event: KVEvent = _event.decode(_by_names(raw) if is_array else raw)
    except _MALFORMED:
        return None
    return event


def _by_names(raw: msgspec.Raw) -> bytes:
    """Return an event that has its fields by their places as one that has them by their names."""
    tag, *values = _array.decode(raw)
    kind = _name.decode(tag)
    names = _KINDS[kind].__struct_fields__ if kind in _KINDS else ()
    told: dict[str, Any] = dict(zip(names[:_ARRAY_FIELDS], values, strict=False))
    if "lora_name" in told and isinstance(of_sglang := _in_lora_name.decode(told["lora_name"]), dict):
        told["lora_name"] = of_sglang.get("lora_name")
        told["cache_salt"] = of_sglang.get("cache_salt")
    return msgspec.msgpack.encode({"type": kind, **told})


def encode_batch(events: Iterable[KVEvent], *, ts: float, data_parallel_rank: int | None = None) -> bytes:
    """A batch as engines publish it.

    Args:
        events: In their order.
        ts: Seconds since the epoch.
        data_parallel_rank: The engine's, where there are several.

    Returns:
        The last frame of a message.

    Raises:
        RequestError: A value that is no event, or that no message can carry.
    """
    told = [instance(event, msgspec.Struct, "events") for event in events]
    try:
        return msgspec.msgpack.encode((ts, list(map(_by_name, told)), data_parallel_rank))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"events: a value that msgpack cannot carry: {said(error)}") from error


def _by_name(event: msgspec.Struct) -> dict[str, Any]:
    """Return an event as vLLM writes it: its router refuses a batch with a key that vLLM does not have, even null."""
    kind = type(event).__name__
    left_out = {name for name in _NOT_VLLMS.get(kind, ()) if getattr(event, name) is None}
    return {"type": kind} | {
        name: value for name, value in msgspec.structs.asdict(event).items() if name not in left_out
    }
