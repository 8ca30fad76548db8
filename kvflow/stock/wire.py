"""Messages of the stock side channel, byte for byte: the question for a rank's metadata, and its answer.

A stock engine's listener expects one question. So only one function makes questions, and only the expected one. Answers
are decoded strictly and with limits.
"""

from __future__ import annotations

import math
import zlib
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from kvflow.checks import counted, is_name
from kvflow.config import ENGINE_ID_CHARS_MAX, RANKS_MAX
from kvflow.core.cache.tensors import NAME_CHARS_MAX
from kvflow.core.protocol.codec import WireError
from kvflow.core.protocol.messages import REGIONS_MAX
from kvflow.stock.versions import HASH, ReleaseLine

_QUESTION_NAME = b"get_meta_msg"
_AGENT = b"nixlSerDes|Agent"
_AGENT_CHARS_MAX = 512
METADATA_BYTES_MAX = 4 << 20
QUESTION_BYTES_MAX = 64
_FIELDS_MAX = 256

Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Size = Annotated[int, Meta(ge=1, lt=1 << 31)]
Address = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Bytes = Annotated[int, Meta(ge=1, lt=1 << 47)]
Number = Annotated[int, Meta(ge=-1, lt=1 << 31)]
Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
Ranks = Annotated[int, Meta(ge=1, le=RANKS_MAX)]
_Many = Meta(max_length=REGIONS_MAX)

DecodedT = TypeVar("DecodedT")


class StockMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """A stock rank's metadata: the fields of vLLM's NixlAgentMetadata in all supported release lines.

    A field that the rank's release line does not send has its default value.
    """

    engine_id: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    agent_metadata: bytes
    kv_caches_base_addr: Annotated[list[Address], Meta(min_length=1, max_length=REGIONS_MAX)]
    device_id: Count
    num_blocks: Size
    block_lens: Annotated[list[Bytes], Meta(min_length=1, max_length=REGIONS_MAX)]
    kv_cache_layout: Name
    block_size: Size
    ssm_sizes: tuple[Count, Count]
    attn_backend_name: Name
    physical_blocks_per_logical_kv_block: Size
    block_strides: Annotated[list[Bytes], _Many] | None = None
    """For each region, the bytes from one block's beginning to the next; sent since vLLM 0.29. None: blocks follow each
    other without gaps."""
    region_num_blocks: Annotated[list[Size], _Many] | None = None
    region_group_ids: Annotated[list[Number], _Many] | None = None
    region_names: Annotated[list[Name], _Many] | None = None
    region_mem_types: Annotated[list[Name], _Many] | None = None
    dcp_size: Ranks = 1
    pcp_size: Ranks = 1
    ple_block_len: Size | None = None
    region_members: Annotated[list[msgspec.Raw], _Many] = []
    """For each region, the names of its layers, as an encoded list; sent since vLLM 0.31. kvflow reads only caches with
    one layer name for each region, so it decodes neither these lists nor `packed_member_layouts`."""
    packed_member_layouts: Annotated[dict[Name, msgspec.Raw], _Many] = {}

    @property
    def packs_layers(self) -> bool:
        """True if a region holds several layers, each in some bytes of every block."""
        return bool(self.packed_member_layouts) or not all(map(_has_one_name, self.region_members))


class StockAnswer(NamedTuple):
    """A stock listener's decoded answer."""

    compatibility_hash: str
    metadata: StockMetadata
    fields: frozenset[str]
    """Names of all fields in the encoded metadata, even those that kvflow does not know."""
    crc32: int
    """CRC-32 of the encoded metadata. It changes if the rank registers its cache again, and readers must then connect
    again."""


class _Payload(msgspec.Struct, frozen=True, kw_only=True):
    compatibility_hash: Annotated[str, Meta(max_length=256)]
    agent_metadata_bytes: bytes


_QUESTION = msgspec.msgpack.Decoder(tuple[bytes, Count, Count])
_PAYLOAD, _CLOCK = msgspec.msgpack.Decoder(_Payload), msgspec.msgpack.Decoder(float)
METADATA = msgspec.msgpack.Decoder(StockMetadata)
_FIELDS = msgspec.msgpack.Decoder(Annotated[dict[str, msgspec.Raw], Meta(max_length=_FIELDS_MAX)])
_ONE_NAME = msgspec.msgpack.Decoder(Annotated[list[Name], Meta(max_length=1)])


def encode_question(pp_rank: int, tp_rank: int) -> bytes:
    """Return the message that asks a stock listener for a rank's metadata.

    The rank has to exist (`stock.metadata`). ValueError if an index is out of range.
    """
    if not (0 <= pp_rank < RANKS_MAX and 0 <= tp_rank < RANKS_MAX):
        raise ValueError(f"no rank: pp {pp_rank}, tp {tp_rank}")
    return msgspec.msgpack.encode((_QUESTION_NAME, pp_rank, tp_rank))


def decode_question(frame: bytes) -> tuple[int, int]:
    """Return the pp_rank and tp_rank that a stock reader asks about. WireError if `frame` is no such question."""
    if len(frame) > QUESTION_BYTES_MAX:
        raise WireError(f"a question of {counted(len(frame), 'byte')}, at most {QUESTION_BYTES_MAX}")
    asked, pp_rank, tp_rank = _decode(frame, _QUESTION, "a question")
    if asked != _QUESTION_NAME:
        raise WireError(f"a question for {asked[:40]!r}")
    return pp_rank, tp_rank


def encode_metadata(metadata: StockMetadata, line: ReleaseLine) -> bytes:
    """Return `metadata` encoded with the fields that stock readers of release line `line` expect."""
    return msgspec.msgpack.encode({name: getattr(metadata, name) for name in line.metadata})


def encode_answer(compatibility_hash: str, metadata: bytes, clock_s: float) -> list[bytes]:
    """Return the two frames of the answer to a stock reader's question.

    The first has the compatibility hash and the encoded metadata; the second has the listener's clock in seconds.
    """
    payload = _Payload(compatibility_hash=compatibility_hash, agent_metadata_bytes=metadata)
    return [msgspec.msgpack.encode(payload), msgspec.msgpack.encode(clock_s)]


def decode_answer(frames: list[bytes], bytes_max: int = METADATA_BYTES_MAX) -> StockAnswer:
    """Decode the frames of a stock listener's answer. WireError if they are invalid, or larger than `bytes_max`."""
    if len(frames) != 2:
        raise WireError(f"{counted(len(frames), 'frame')}, a stock listener (vLLM 0.26 and later) answers with 2")
    if len(frames[0]) > bytes_max or len(frames[1]) > QUESTION_BYTES_MAX:
        sizes = f"{len(frames[0])} and {counted(len(frames[1]), 'byte')}"
        raise WireError(f"an answer of {sizes}, at most {bytes_max} and {QUESTION_BYTES_MAX}")
    payload = _decode(frames[0], _PAYLOAD, "the answer")
    clock_s = _decode(frames[1], _CLOCK, "its clock")
    if not HASH.fullmatch(payload.compatibility_hash):
        raise WireError(f"compatibility hash {payload.compatibility_hash[:80]!a} is not 64 hexadecimal digits")
    if not math.isfinite(clock_s):
        raise WireError(f"its clock is {clock_s}, expected a finite number")
    fields = _decode(payload.agent_metadata_bytes, _FIELDS, "its metadata")
    metadata = _decode(payload.agent_metadata_bytes, METADATA, "its metadata")
    _check(metadata)
    return StockAnswer(
        payload.compatibility_hash, metadata, frozenset(fields), zlib.crc32(payload.agent_metadata_bytes)
    )


def agent_name_of(agent_metadata: bytes) -> str:
    """Return the name of the NIXL agent that made `agent_metadata`. A restarted stock worker has another name.

    WireError if the metadata is not in NIXL's form.
    """
    begin = len(_AGENT) + 8
    size = int.from_bytes(agent_metadata[len(_AGENT) : begin], "little")
    name = agent_metadata[begin : begin + size]
    whole = agent_metadata.startswith(_AGENT) and 0 < size <= _AGENT_CHARS_MAX
    if not whole or agent_metadata[begin + size : begin + size + 1] != b"|":
        raise WireError(f"agent metadata of {counted(len(agent_metadata), 'byte')} is not NIXL's")
    try:
        text = name.decode()
    except UnicodeDecodeError as error:
        raise WireError("the name of its NIXL agent is not UTF-8") from error
    if not is_name(text, _AGENT_CHARS_MAX):
        raise WireError(f"the name of its NIXL agent is {text[:80]!a}")
    return text


def _check(metadata: StockMetadata) -> None:
    """Raise WireError if lists in the metadata differ in length, or if a region has an impossible size."""
    count = len(metadata.kv_caches_base_addr)
    if not is_name(metadata.engine_id, ENGINE_ID_CHARS_MAX):
        raise WireError(f"engine_id {metadata.engine_id[:80]!a} is not a valid name")
    tables = ("block_lens", "block_strides", "region_num_blocks", "region_group_ids", "region_names")
    for name in (*tables, "region_mem_types"):
        table = getattr(metadata, name)
        if table is not None and len(table) != count:
            raise WireError(f"{name}: {len(table)}, expected one for each of {counted(count, 'region')}")
    if metadata.region_members and len(metadata.region_members) != count:
        given = len(metadata.region_members)
        raise WireError(f"region_members: {given}, expected one for each of {counted(count, 'region')}")
    strides = metadata.block_strides or metadata.block_lens
    counts = metadata.region_num_blocks or [metadata.num_blocks] * count
    rows = zip(metadata.kv_caches_base_addr, strides, metadata.block_lens, counts, strict=True)
    for base, stride, size, blocks in rows:
        if stride < size or base + stride * blocks >= 1 << 63:
            raise WireError(
                f"a region at {base}: {counted(blocks, 'block')} of {counted(size, 'byte')}, stride {stride}"
            )


def _has_one_name(names: msgspec.Raw) -> bool:
    """Return True if `names` is an encoded list of at most one name."""
    try:
        _ONE_NAME.decode(names)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[DecodedT], what: str) -> DecodedT:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"{what}, {counted(len(data), 'byte')}, does not decode: {str(error)[:200]}") from error
