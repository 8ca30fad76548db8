"""KV events as vLLM and SGLang publish them: batches of changes to the blocks in an engine's prefix cache.

A batch is msgpack: an array of time, events and data parallel rank. An event is a map with its class name under `type`
(vLLM since 0.26, SGLang since 0.5.23), or an array that begins with the class name (earlier versions). In vLLM index 7
of the array is the name of an adapter; in SGLang 0.5.18 to 0.5.22 it is a map of further fields by name.

With EAGLE or MTP, SGLang's events have pairs of neighbouring tokens in place of tokens; each pair is read as its first.

Missing fields get their defaults. Unknown keys, array entries and events are skipped; an event of a known type that
cannot be read is reported. The cost of decoding a batch is bounded by its size in bytes and by the limits below, which
are checked before the entries are decoded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from kvflow.checks import counted, error_text, instance, printable
from kvflow.errors import ProtocolError, RequestError

BATCH_BYTES_MAX = 4 << 20
EVENTS_MAX, BLOCKS_MAX = 1 << 14, 1 << 16
"""Maximum number of events in a batch, and maximum number of blocks in an event."""
TOKENS_MAX, BLOCK_TOKENS_MAX = 1 << 20, 1 << 16
_ERROR_CHARS_MAX = 200

BlockHash: TypeAlias = int | Annotated[bytes, Meta(max_length=64)]
"""An engine's own hash of a block: the whole hash or its low 64 bits (vLLM), or a signed 64-bit number (SGLang)."""
_Hashes: TypeAlias = Annotated[list[BlockHash], Meta(max_length=BLOCKS_MAX)]
_ExtraKeys: TypeAlias = Annotated[list[str | tuple[str, int]], Meta(max_length=1 << 10)]


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: a prefix cache has stored one or more consecutive blocks of a prompt."""

    block_hashes: _Hashes
    """The engine's own hashes of the stored blocks, in prompt order."""
    parent_block_hash: BlockHash | None = None
    """The engine's own hash of the block before the first stored block; None if there is no block before."""
    token_ids: Annotated[list[int], Meta(max_length=TOKENS_MAX)]
    """Token ids of all stored blocks, in prompt order: `block_size` tokens for each block."""
    block_size: Annotated[int, Meta(ge=1, le=BLOCK_TOKENS_MAX)]
    """Number of tokens in a block."""
    lora_id: int | None = None
    """Number of the LoRA adapter that computed the blocks, if any."""
    medium: str | None = None
    """Kind of memory that holds the blocks. "GPU" or None: the KV cache with which the engine computes, on any device.
    """
    lora_name: str | None = None
    """Name of the LoRA adapter that computed the blocks, if any."""
    extra_keys: Annotated[list[_ExtraKeys | None], Meta(max_length=BLOCKS_MAX)] | None = None
    """One entry for each block: the keys that the block's hash covers besides the tokens; None if there are none. The
    key of a cache salt is a text. The key of a picture is (identifier, offset in tokens from the block's start).
    """
    group_idx: int | None = None
    """Index of the blocks' group of layers, if the KV cache has several groups."""
    kv_cache_spec_kind: str | None = None
    """Kind of the blocks' group of layers, such as "full_attention" or "sliding_window"."""
    cache_salt: str | None = None
    """Cache salt of the request; only SGLang sends it."""


class _BlockOfPairs(BlockStored, frozen=True, kw_only=True, tag="BlockStored"):
    token_ids: Annotated[  # type: ignore[assignment]
        list[tuple[int, int]], Meta(max_length=BLOCK_TOKENS_MAX)
    ]


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: a prefix cache has removed blocks of one group of layers from one kind of memory."""

    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: a prefix cache has removed all of its blocks, or all of its blocks in the kind of memory `medium`."""

    medium: str | None = None
    """Kind of memory that was cleared; None if all kinds were."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
_ARRAY_FIELDS_MAX = 10  # fields for which the arrays of both engines agree
_ARRAY_ENTRIES_MAX = 256
_FIELDS_NOT_IN_VLLM = {"BlockStored": ("cache_salt",), "AllBlocksCleared": ("medium",)}


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: Annotated[list[msgspec.Raw], Meta(max_length=EVENTS_MAX)]
    data_parallel_rank: int | None = None


class _Tagged(msgspec.Struct, frozen=True):
    type: str


_EVENT_TYPES = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
_batch_decoder = msgspec.msgpack.Decoder(_Batch)
_event_decoder = msgspec.msgpack.Decoder(KVEvent)
_pairs_decoder = msgspec.msgpack.Decoder(_BlockOfPairs)
_tag_decoder = msgspec.msgpack.Decoder(_Tagged)
_array_decoder = msgspec.msgpack.Decoder(
    Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=_ARRAY_ENTRIES_MAX)]
)
_name_decoder = msgspec.msgpack.Decoder(str)
_lora_name_decoder = msgspec.msgpack.Decoder(str | dict[str, msgspec.Raw] | None)
_MALFORMED = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


def decode_batch(
    payload: bytes, *, peer: str = "", on_unreadable: Callable[[str], None] = lambda _: None
) -> Iterator[KVEvent]:
    """Decode a batch. Events are decoded one by one, while the result is iterated over.

    Args:
        payload: bytes of the batch: the last frame of a ZeroMQ message.
        peer: name of the sender, for the error message.
        on_unreadable: called with the reason for each event of a known type that cannot be read.

    Returns:
        An iterator over the events, in order. Events of unknown types, and those that cannot be read, are skipped.
            Iterating raises no errors.

    Raises:
        ProtocolError: raised by the call itself: `payload` is no batch, or is too large.
    """
    if len(payload) > BATCH_BYTES_MAX:
        raise ProtocolError(
            f"KV events from {peer or 'a publisher'}: a batch of {counted(len(payload), 'byte')}, "
            f"at most {BATCH_BYTES_MAX}",
            peer=peer,
        )
    try:
        batch = _batch_decoder.decode(payload)
    except _MALFORMED as error:
        why = f"KV events from {peer or 'a publisher'}: not a batch: {printable(str(error), _ERROR_CHARS_MAX)}"
        raise ProtocolError(why, peer=peer) from error
    return (event for raw in batch.events if (event := _decode_event(raw, on_unreadable)) is not None)


def _decode_event(raw: msgspec.Raw, on_unreadable: Callable[[str], None]) -> KVEvent | None:
    """Return the event that the msgpack bytes `raw` encode, or None for an event of unknown type or form.

    If the type is known, call `on_unreadable` with the reason.
    """
    kind = memoryview(raw)[0]
    is_array = 0x90 <= kind <= 0x9F or kind in (0xDC, 0xDD)
    try:
        event: KVEvent = _event_decoder.decode(_array_to_map(raw) if is_array else raw)
        return event
    except _MALFORMED as error:
        why = printable(str(error), _ERROR_CHARS_MAX)
    with contextlib.suppress(*_MALFORMED):
        pairs = _pairs_decoder.decode(_array_to_map(raw) if is_array else raw)
        return BlockStored(**msgspec.structs.asdict(pairs) | {"token_ids": [token for token, _ in pairs.token_ids]})
    with contextlib.suppress(*_MALFORMED):
        name = _name_decoder.decode(_array_decoder.decode(raw)[0]) if is_array else _tag_decoder.decode(raw).type
        if name in _EVENT_TYPES:
            on_unreadable(f"{name}: {why}")
    return None


def _array_to_map(raw: msgspec.Raw) -> bytes:
    """Convert a msgpack event from an array of fields (earlier engine versions) to a map of fields by name."""
    tag, *values = _array_decoder.decode(raw)
    kind = _name_decoder.decode(tag)
    names = _EVENT_TYPES[kind].__struct_fields__ if kind in _EVENT_TYPES else ()
    fields: dict[str, Any] = dict(zip(names[:_ARRAY_FIELDS_MAX], values, strict=False))
    if "lora_name" in fields and isinstance(of_sglang := _lora_name_decoder.decode(fields["lora_name"]), dict):
        fields["lora_name"] = of_sglang.get("lora_name")
        fields["cache_salt"] = of_sglang.get("cache_salt")
    return msgspec.msgpack.encode({"type": kind, **fields})


def encode_batch(events: Iterable[KVEvent], *, ts: float, data_parallel_rank: int | None = None) -> bytes:
    """Encode events as one msgpack batch, in vLLM's form.

    Args:
        events: events in the order in which they happened.
        ts: time in seconds since the epoch.
        data_parallel_rank: data parallel rank of the engine, if the engine has several.

    Returns:
        The bytes of the batch, to be sent as the last frame of a ZeroMQ message.

    Raises:
        RequestError: a value is no event, or cannot be encoded.
    """
    checked = [instance(event, msgspec.Struct, "events") for event in events]
    try:
        return msgspec.msgpack.encode((ts, list(map(_event_as_map, checked)), data_parallel_rank))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"events: a value cannot be encoded as msgpack: {error_text(error)}") from error


def _event_as_map(event: msgspec.Struct) -> dict[str, Any]:
    """Return an event as a dict of its fields by name. If a field is unknown to vLLM and None, leave the field out.

    vLLM's router refuses a batch with an unknown key, even if the value is null.
    """
    kind = type(event).__name__
    left_out = {name for name in _FIELDS_NOT_IN_VLLM.get(kind, ()) if getattr(event, name) is None}
    return {"type": kind} | {
        name: value for name, value in msgspec.structs.asdict(event).items() if name not in left_out
    }
