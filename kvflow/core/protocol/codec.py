"""Encoding and decoding of messages.

A message of the side channel is two MessagePack frames: a `Header` and a body. The header has the protocol version and
a digest of the cache's `Compatibility`. It is decoded first, so that a peer of another version gets an answer. Decoding
is strict (`WireError`) and runs no code of the peer.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TypeAlias, TypeVar, Union, get_args

import msgspec

from kvflow.checks import counted, printable, refused_value_text, try_call
from kvflow.core.bounds import Count, Digest, Name
from kvflow.core.protocol.messages import CoreReply, CoreRequest, PartReply, ReaderRequest, Reply, Request
from kvflow.core.protocol.notifications import Notification
from kvflow.errors import InvalidInput

PROTOCOL_VERSION = 6
MAGIC = "kvflow"
_ERROR_CHARS_MAX = 300
_KIND_CHARS_MAX = 40

MessageT = TypeVar("MessageT")
RequestDecoder: TypeAlias = "msgspec.msgpack.Decoder[Request]"


class WireError(Exception):
    """Bytes from a peer are not a valid kvflow message.

    If a question is invalid, the runtime refuses it; if an answer is invalid, the runtime raises ProtocolError.
    """


class UnknownRequest(WireError):
    """A request of a kind that this runtime does not answer, for example because an optional part is missing."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of every side-channel message.

    A header is an array in all protocol versions, so that any peer can read it.
    """

    magic: Name
    version: Count
    fingerprint: Digest
    question: Count = 0
    """Number of the question on its connection, repeated in the header of the answer. 0 if the peer does not number its
    questions."""
    answer_bytes_max: Count = 0
    """Maximum bytes of an answer that the sender of the question accepts; 0 if the sender states no bound."""


encode = msgspec.msgpack.Encoder().encode
_HEADER = msgspec.msgpack.Decoder(Header)
_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(CoreReply)
_NOTIFICATION: msgspec.msgpack.Decoder[Notification] = msgspec.msgpack.Decoder(Notification)


def encode_frames(header: Header, body: Request | Reply) -> list[bytes]:
    return [encode(header), encode(body)]


def our_header(fingerprint: bytes, question: int = 0, answer_bytes_max: int = 0) -> Header:
    return Header(MAGIC, PROTOCOL_VERSION, fingerprint, question, answer_bytes_max)


def decode_header(frame: bytes) -> Header:
    """Decode the first frame of a message.

    WireError if `frame` is not a kvflow header. The caller checks the protocol version.
    """
    header = _decode(frame, _HEADER)
    if header.magic != MAGIC:
        raise WireError(f"not a kvflow header: magic {header.magic[:16]!r}")
    return header


def requests_with(more: Iterable[type[ReaderRequest]]) -> RequestDecoder:
    """Return a decoder of the requests that a rank accepts: those of the core, and `more`, those of its parts."""
    return msgspec.msgpack.Decoder(Union[(CoreRequest, *more)])


CORE_REQUESTS = requests_with(())


def decode_request(frame: bytes, decoder: RequestDecoder = CORE_REQUESTS) -> Request:
    """Decode a request. `decoder`: of the accepted requests, from `requests_with`.

    UnknownRequest if the request has another type; WireError if it is invalid.
    """
    try:
        return _decode(frame, decoder)
    except WireError as error:
        raw = try_call(partial(msgspec.msgpack.decode, frame))
        tag = raw.get("type") if isinstance(raw, dict) else None
        if not isinstance(tag, str) or tag in {kind.__struct_config__.tag for kind in get_args(decoder.type)}:
            raise
        raise UnknownRequest(f"nothing here answers a question of kind {printable(tag, _KIND_CHARS_MAX)!r}") from error


def replies_with(more: type[PartReply]) -> msgspec.msgpack.Decoder[Reply]:
    """Return a decoder of the replies to a request of an optional part: those of the core, and `more`, the part's."""
    return msgspec.msgpack.Decoder(CoreReply | more)


def decode_reply(frame: bytes, question: Request | None = None) -> Reply:
    """Decode the reply to `question`; None: to a question of the core. WireError if it is invalid."""
    decoder = question.replies if isinstance(question, ReaderRequest) else None
    return _decode(frame, decoder or _REPLY)


def decode_notification(payload: bytes) -> Notification:
    return _decode(payload, _NOTIFICATION)


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[MessageT]) -> MessageT:
    try:
        return decoder.decode(data)
    except InvalidInput as error:  # raised by a struct that checks its own values
        raise _undecoded(data, str(error)) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raw = try_call(partial(msgspec.msgpack.decode, data))
        raise _undecoded(data, str(error) if raw is None else refused_value_text(error, raw)) from error


def _undecoded(data: bytes, why: str) -> WireError:
    why = printable(why, _ERROR_CHARS_MAX)  # msgspec quotes an unknown tag or value
    return WireError(f"a message of {counted(len(data), 'byte')} does not decode: {why}")
