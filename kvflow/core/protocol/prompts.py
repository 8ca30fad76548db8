"""Digests of prompts, so that a ticket is not used for another prompt.

A router may mix tickets up, or both engines may make different tokens of the same text (another chat template, another
tokenizer). The bytes would arrive in good order, and the answer would be about something else. So a ticket can carry a
digest of its tokens, which the consumer compares with its own.

More than tokens can tell prompts apart: an adapter, pictures, a cache's salt. An engine has the token that such a thing
begins with `marked` by it, and gives what comes of that as the prompt. A prompt without is its token ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from kvflow.checks import answer, count, shown, whole_numbers
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import PromptMismatch, RequestError

_DIGEST_BYTES = 16
_MARKED = 1 << 62  # above every token id


def prompt_digest(request_id: str, token_ids: Sequence[int]) -> str:
    """Digest (BLAKE2b) of a request's tokens. Equal prompts of two requests have different ones: tickets tell nobody.

    RequestError if they are no token ids.
    """
    tokens = whole_numbers(token_ids, f"request {request_id!r}: prompt")
    state = hashlib.blake2b(request_id.encode(), digest_size=_DIGEST_BYTES)
    state.update(b"\0" + tokens.astype("<i8").tobytes())
    return state.hexdigest()


MarkKeys: TypeAlias = Mapping[int, Sequence[tuple[str | bytes, ...]]]
"""Keys that the blocks of a prompt depend on besides its tokens, in the field's words, by the place where it begins."""


def marked_by_keys(token_ids: Sequence[int], keys: MarkKeys) -> list[int]:
    """Prompt `marked` with its keys. Engines and readers of their events make the same one.

    Keys of a place are in this order: ("lora", name, path), ("cache_salt", salt), ("mm", identifier).
    """
    return marked(token_ids, {place: msgspec.msgpack.encode(found) for place, found in keys.items()})


def marked(token_ids: Sequence[int], marks: Mapping[int, bytes]) -> list[int]:
    """Prompt as numbers; at a marked place the number stands for the token and the mark.

    So whatever of a prompt is offered is compared with the marks in it, and not with those that come later.
    """
    prompt = list(token_ids)
    for place in marks.keys() & range(len(prompt)):
        token = int(prompt[place]).to_bytes(8, "little", signed=True)
        state = hashlib.blake2b(marks[place], digest_size=8, key=token)
        prompt[place] = _MARKED | int.from_bytes(state.digest(), "little") >> 2
    return prompt


def offered_digest(request_id: str, token_ids: Sequence[int], num_tokens: int) -> str:
    """Digest of the offered part of a prompt, for its ticket.

    RequestError if it is shorter than that, or holds what are no token ids.
    """
    what = f"request {request_id!r}: prompt"
    if count(token_ids, what) < num_tokens:
        raise RequestError(
            f"request {request_id!r}: the prompt has {len(token_ids)} tokens, fewer than num_tokens {num_tokens}"
        )
    return prompt_digest(request_id, _beginning(token_ids, num_tokens, what))


def check_prompt(ticket: Ticket, token_ids: Sequence[int], what: str) -> None:
    """PromptMismatch unless the ticket offers the beginning of this prompt. A ticket without a digest passes.

    `what` names who asks. RequestError if it is no prompt at all, as far as that is looked at.
    """
    found, offered = count(token_ids, f"{what}: prompt"), ticket.num_tokens
    if not ticket.prompt_digest:
        return
    if found < offered:
        raise PromptMismatch(
            f"{what}: its prompt has {found} tokens, the ticket of request {ticket.request_id!r} offers {offered}"
        )
    digest = prompt_digest(ticket.request_id, _beginning(token_ids, offered, f"{what}: prompt"))
    if digest != ticket.prompt_digest:
        raise PromptMismatch(
            f"{what}: the first {offered} tokens of its prompt are not those that the ticket of request "
            f"{ticket.request_id!r} offers, or go with another adapter, picture or salt: "
            f"digest {digest}, the ticket's is {ticket.prompt_digest}"
        )


def check_alike(first: Ticket, other: Ticket, what: str) -> None:
    """PromptMismatch if two tickets are of different prompts, as far as both tell.

    Digests can be compared where the request ids are equal, since they are salted with those.
    """
    if first.awaited or other.awaited:
        return
    ours, theirs = (f"{one.engine_id!r} at {one.address}" for one in (first, other))
    if first.offered_tokens != other.offered_tokens:
        offers = f"{ours} offers {first.offered_tokens} tokens, {theirs} {other.offered_tokens}"
        raise PromptMismatch(f"{what}: its tickets are not of one prompt: {offers}")
    told = {first.prompt_digest, other.prompt_digest} - {""}
    if first.request_id == other.request_id and len(told) > 1:
        digests = f"{ours} has digest {first.prompt_digest}, {theirs} {other.prompt_digest}"
        raise PromptMismatch(f"{what}: its tickets are not of one prompt: {digests}")


def _beginning(token_ids: Sequence[int], num_tokens: int, what: str) -> Sequence[int]:
    found = answer(lambda: token_ids[:num_tokens])
    if found is None:
        raise RequestError(f"{what}: expected a list of token ids, got {shown(token_ids)}")
    return found
