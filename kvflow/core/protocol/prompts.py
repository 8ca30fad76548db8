"""Digests of prompts, so that a ticket is not used for another prompt.

A router may mix tickets up, or the two engines may tokenize the same text differently. Then the bytes would arrive
intact, and the answer would be to another prompt. So a ticket can carry a digest of the prompt's tokens, which the
reader compares with the digest of its own prompt.

Prompts can also differ in an adapter, pictures, or a cache salt. A *mark* says that one of these begins at a token. The
digest of a prompt with marks (`marked_by_keys`) has one section for the tokens and one for each kind of mark. If only
marks differ, the request may have lost its pictures on the way, and the engine must not compute it
(`PromptMismatch.parts`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from kvflow.checks import count, counted, short_repr, try_call, whole_numbers
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import TOKENS, PromptMismatch, RequestError

_DIGEST_BYTES = 16
_PART_BYTES = 8
_MARKED = 1 << 62  # above every token id
_OTHER = "mark"
_PARTS = {
    "lora": "adapter",
    "cache_salt": "cache salt",
    "mm": "pictures",
    "prompt_embeds": "embeddings",
    _OTHER: "adapter, picture or salt",
}
"""Words for kinds of marks in error messages, by the name of the kind in a prompt's digest, such as "lora"."""


class Mark(msgspec.Struct, frozen=True):
    """Mark at one position of a prompt: for example, an adapter, a picture or a cache salt begins there."""

    place: int
    token: int
    """Token id at the position `place`."""
    parts: tuple[tuple[str, bytes], ...]
    """(kind, digest) for each kind of mark at the position. The digest is of the `MarkKeys` keys of that kind there."""


class MarkedPrompt(list[int]):
    """A prompt as a list of numbers, with its marks. A slice keeps the marks inside it; `+` keeps those of both sides.

    A number is a token id or, at a position with a mark, a hash (`marked_by_keys`).
    """

    def __init__(self, numbers: Iterable[int], marks: Iterable[Mark]) -> None:
        super().__init__(numbers)
        self.marks = tuple(marks)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if not isinstance(index, slice):
            return found
        places = range(len(self))[index]
        return MarkedPrompt(found, _shift_marks([mark for mark in self.marks if mark.place in places], places.index))

    def __add__(self, more: list[Any]) -> MarkedPrompt:  # type: ignore[override]
        return MarkedPrompt([*self, *more], (*self.marks, *_shift_marks(marks_of(more), len(self).__add__)))


def _shift_marks(marks: Iterable[Mark], to: Callable[[int], int]) -> list[Mark]:
    return [msgspec.structs.replace(mark, place=to(mark.place)) for mark in marks]


def marks_of(prompt: Sequence[int] | None) -> tuple[Mark, ...]:
    """Return the marks of `prompt`; () if it is a plain list of token ids, or None."""
    return prompt.marks if isinstance(prompt, MarkedPrompt) else ()


def with_marks(numbers: Sequence[int] | None, marks: Sequence[Mark]) -> Sequence[int] | None:
    """Return `numbers` and `marks`, which messages carry separately, as one `MarkedPrompt`.

    Return `numbers` itself if it is None or there are no marks.
    """
    return MarkedPrompt(numbers, marks) if marks and numbers is not None else numbers


def prompt_digest(request_id: str, token_ids: Sequence[int]) -> str:
    """Return the digest (BLAKE2b) of a request's prompt, a list of token ids or a `MarkedPrompt`.

    The request id salts the digest, so tickets do not reveal that two requests have the same prompt. The token ids give
    32 hexadecimal digits. Each kind of mark adds `:kind=` and 16 digits, which are salted with the tokens, so that a
    cache salt cannot be guessed from its digest.

    Raises:
        RequestError: `token_ids` is not a list of whole numbers.
    """
    tokens = whole_numbers(token_ids, f"request {request_id!r}: prompt")
    marks = [mark for mark in marks_of(token_ids) if mark.place < len(tokens)]
    for mark in marks:
        tokens[mark.place] = mark.token
    state = hashlib.blake2b(request_id.encode(), digest_size=_DIGEST_BYTES, usedforsecurity=False)
    state.update(b"\0" + tokens.astype("<i8").tobytes())
    parts: dict[str, Any] = {}
    for mark in marks:
        for kind, digest in mark.parts:
            if kind not in parts:
                parts[kind] = hashlib.blake2b(
                    state.digest() + kind.encode(), digest_size=_PART_BYTES, usedforsecurity=False
                )
            parts[kind].update(mark.place.to_bytes(8, "little") + digest)
    return state.hexdigest() + "".join(f":{kind}={parts[kind].hexdigest()}" for kind in sorted(parts))


MarkKeys: TypeAlias = Mapping[int, Sequence[tuple[str | bytes, ...]]]
"""Keys by position in the prompt, from 0. A key, such as ("mm", identifier), stands for an adapter, a picture or
another input that changes the KV cache from that position on."""


def marked_by_keys(token_ids: Sequence[int], keys: MarkKeys) -> list[int]:
    """Return a prompt as a list of numbers: its token ids, but at each position in `keys` a hash of token and keys.

    So if the first n numbers of two results are equal, the two prompts also have equal keys at these n positions.
    Engines and subscribers of their KV events get equal results. The keys of a position must be in this order: ("lora",
    name, path), ("cache_salt", salt), ("mm", identifier), then keys of any other kind.
    """
    prompt, marks = list(token_ids), list[Mark]()
    for place in sorted(keys.keys() & range(len(prompt))):
        parts: dict[str, list[tuple[str | bytes, ...]]] = {}
        for kind, *value in keys[place]:
            parts.setdefault(kind if kind in _PARTS else _OTHER, []).append((kind, *value))
        token = int(prompt[place])
        salt = token.to_bytes(8, "little", signed=True)
        whole = msgspec.msgpack.encode(keys[place])
        state = hashlib.blake2b(whole, digest_size=8, key=salt, usedforsecurity=False)
        prompt[place] = _MARKED | int.from_bytes(state.digest(), "little") >> 2
        digests = tuple((kind, _part_digest(of)) for kind, of in parts.items())
        marks.append(Mark(place, token, digests))
    return MarkedPrompt(prompt, marks) if marks else prompt


def _part_digest(keys: Sequence[tuple[str | bytes, ...]]) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(keys), digest_size=_DIGEST_BYTES, usedforsecurity=False).digest()


def _count_tokens(token_ids: Sequence[int], what: str) -> int:
    """Return the number of tokens of a prompt. RequestError if it is no list, or a list of rows, as of a batch."""
    found = count(token_ids, what)
    row = try_call(lambda: len(token_ids[0])) if found else None  # type: ignore[arg-type]
    if row is not None:
        rows = f"{counted(found, 'row')}, the first of {counted(row, 'token')}"
        raise RequestError(f"{what}: expected a flat list of token ids, got {rows}: pass one row, such as prompt[0]")
    return found


def offered_digest(request_id: str, token_ids: Sequence[int], num_tokens: int) -> str:
    """Return the digest of the first `num_tokens` tokens of a prompt, for its ticket.

    RequestError if `token_ids` is shorter, or is not a list of whole numbers.
    """
    what = f"request {request_id!r}: prompt"
    if _count_tokens(token_ids, what) < num_tokens:
        raise RequestError(
            f"request {request_id!r}: the prompt has {counted(len(token_ids), 'token')}, fewer than num_tokens "
            f"{num_tokens}"
        )
    return prompt_digest(request_id, _first_tokens(token_ids, num_tokens, what))


def check_prompt(ticket: Ticket, token_ids: Sequence[int], what: str) -> None:
    """Raise PromptMismatch unless `token_ids` begins with the prompt that `ticket` offers.

    The ticket's digest decides; a ticket without a digest passes. `what` begins the message. RequestError if
    `token_ids` is not a list of token ids.
    """
    found, offered = _count_tokens(token_ids, f"{what}: prompt"), ticket.num_tokens
    if not ticket.prompt_digest:
        return
    if found < offered:
        raise PromptMismatch(
            f"{what}: its prompt has {counted(found, 'token')}, the ticket of request {ticket.request_id!r} offers "
            f"{offered}"
        )
    digest = prompt_digest(ticket.request_id, _first_tokens(token_ids, offered, f"{what}: prompt"))
    if digest == ticket.prompt_digest:
        return
    parts, why = _compared(digest, ticket.prompt_digest)
    of = "tokens of its prompt are not those" if parts == TOKENS else "tokens of its prompt are those"
    raise PromptMismatch(
        f"{what}: the first {offered} {of} that the ticket of request {ticket.request_id!r} offers{why}: "
        f"digest {digest}, the ticket's is {ticket.prompt_digest}",
        parts=parts,
    )


def _compared(ours: str, theirs: str) -> tuple[tuple[str, ...], str]:
    """Compare two digests of prompts: `ours`, of the local prompt, and `theirs`, in a ticket.

    Return what differs, ("tokens",) or names of kinds of marks, and a text that describes the marks, for a message.
    """
    (tokens, our_parts), (their_tokens, their_parts) = _split(ours), _split(theirs)
    if tokens != their_tokens:
        return TOKENS, ""
    parts, words = [], []
    for kind in sorted(our_parts.keys() | their_parts.keys()):
        if our_parts.get(kind) == their_parts.get(kind):
            continue
        name = _PARTS.get(kind, kind)
        parts.append(name)
        if kind not in our_parts:
            words.append(f"without its {name}")
        elif kind not in their_parts:
            words.append(f"with {name}, where it has none")
        else:
            words.append(f"with another {name}" if name[-1] != "s" else f"with other {name}")
    return tuple(parts), ", but " + ", and ".join(words)


def _split(digest: str) -> tuple[str, dict[str, str]]:
    """Split a prompt's digest. Return the digits for the tokens, and a dict of the digits for each kind of mark."""
    tokens, *parts = digest.split(":")
    return tokens, dict(part.split("=", 1) for part in parts)


def check_same_prompt(first: Ticket, other: Ticket, what: str) -> None:
    """Raise PromptMismatch if two tickets of one load are for different prompts. `what` begins the message.

    The numbers of offered tokens must be equal. If the request ids, which salt the digests, are equal, so must be the
    digests. A pending ticket passes, because its prompt is not known.
    """
    if first.awaited or other.awaited:
        return
    ours, theirs = (f"{one.engine_id!r} at {one.address}" for one in (first, other))
    if first.offered_tokens != other.offered_tokens:
        offers = f"{ours} offers {counted(first.offered_tokens, 'token')}, {theirs} {other.offered_tokens}"
        raise PromptMismatch(f"{what}: its tickets are not of one prompt: {offers}")
    told = {first.prompt_digest, other.prompt_digest} - {""}
    if first.request_id == other.request_id and len(told) > 1:
        digests = f"{ours} has digest {first.prompt_digest}, {theirs} {other.prompt_digest}"
        parts, _ = _compared(first.prompt_digest, other.prompt_digest)
        why = f"its tickets are not of one prompt, but of other {parts[0]}: {digests}"
        raise PromptMismatch(f"{what}: {why}", parts=parts)


def _first_tokens(token_ids: Sequence[int], num_tokens: int, what: str) -> Sequence[int]:
    found = try_call(lambda: token_ids[:num_tokens])
    if found is None:
        raise RequestError(f"{what}: expected a list of token ids, got {short_repr(token_ids)}")
    return found
