"""What tells one prompt from another, so that a ticket is not used for a prompt that it is not of.

A router may mix tickets up, or both engines may make different tokens of the same text (another chat template, another
tokenizer). The bytes would arrive in good order, and the answer would be about something else. So a ticket can carry a
digest of its tokens, which the consumer compares with its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvflow.core.ticket import Ticket
from kvflow.errors import PromptMismatch, RequestError

_DIGEST_BYTES = 16


def prompt_digest(request_id: str, token_ids: Sequence[int]) -> str:
    """A digest (BLAKE2b) of a request's tokens. Of equal prompts of two requests it differs: tickets tell nobody.

    RequestError if they are no token ids.
    """
    try:
        tokens = np.asarray(token_ids)
    except (TypeError, ValueError, OverflowError):
        tokens = np.empty(0, dtype=object)
    if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and len(token_ids)):
        raise RequestError(f"request {request_id!r}: prompt: expected token ids, got {str(token_ids)[:80]!a}")
    state = hashlib.blake2b(request_id.encode(), digest_size=_DIGEST_BYTES)
    state.update(b"\0" + tokens.astype("<i8").tobytes())
    return state.hexdigest()


def check_prompt(ticket: Ticket, token_ids: Sequence[int], what: str) -> None:
    """PromptMismatch unless what the ticket offers is the beginning of this prompt. A ticket may not say.

    `what` names who asks.
    """
    if not ticket.prompt_digest:
        return
    count = ticket.num_tokens
    if len(token_ids) < count:
        raise PromptMismatch(
            f"{what}: its prompt has {len(token_ids)} tokens, "
            f"the ticket of request {ticket.request_id!r} offers {count}"
        )
    digest = prompt_digest(ticket.request_id, token_ids[:count])
    if digest != ticket.prompt_digest:
        raise PromptMismatch(
            f"{what}: the first {count} tokens of its prompt are not those that the ticket of request "
            f"{ticket.request_id!r} offers: digest {digest}, the ticket's is {ticket.prompt_digest}"
        )
