"""Keys that name a prefix by what is in it, so that two engines can tell that they mean the same one.

A key is one digest of 32 bytes over a salt and all tokens before the block's end:

    key(t) = BLAKE2b-256( b"kvflow-prefix-1\\0" + u32le(len(salt)) + salt + int64le of each of tokens[0:t] )

So it does not depend on how the tokens are cut into blocks: engines with blocks of 16 and of 32 tokens agree at each
boundary that both have. Hashes of engines are not translated; whoever has the tokens computes the keys from them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvflow.checks import instance, whole, whole_numbers
from kvflow.errors import RequestError

KEY_BYTES = 32
SALT_BYTES_MAX = 1024
_BEGINNING = b"kvflow-prefix-1\0"
_TOKEN = np.dtype("<i8")


def prefix_keys(tokens: Sequence[int], block_tokens: int, *, salt: bytes = b"") -> list[bytes]:
    """Keys of a prompt's full blocks, by which `PrefixRequest` asks and `PrefixCache.match` is asked.

    Args:
        tokens: The prompt's token ids. What else tells prompts apart, such as an adapter or pictures, changes numbers
            in it on both sides alike, as in the digest of a ticket.
        block_tokens: Tokens between two keys. Holder and reader need not agree; they find what both have a key for.
        salt: Shares prefixes among those who give the same one, such as a tenant's name; 1,024 bytes at most.

    Returns:
        One key of 32 bytes for each full block. Key i is of the first `(i + 1) * block_tokens` tokens.

    Raises:
        RequestError: No token ids, `block_tokens` below 1, or a salt that is no bytes or too long.
    """
    step = whole(block_tokens, "block_tokens", least=1) * _TOKEN.itemsize
    data = memoryview(token_bytes(tokens, "tokens"))
    state, keys = key_state(salt), list[bytes]()
    for start in range(0, len(data) - step + 1, step):
        state.update(data[start : start + step])
        keys.append(state.digest())
    return keys


def key_state(salt: bytes) -> hashlib.blake2b:
    """The running hash of no tokens: updated by those of a block, its digest is the block's key.

    RequestError if the salt is no bytes, or too long.
    """
    given = instance(salt, bytes, "salt")
    if len(given) > SALT_BYTES_MAX:
        raise RequestError(f"salt: expected at most {SALT_BYTES_MAX} bytes, got {len(given)}")
    beginning = _BEGINNING + len(given).to_bytes(4, "little") + given
    return hashlib.blake2b(beginning, digest_size=KEY_BYTES, usedforsecurity=False)


def token_bytes(tokens: Sequence[int], what: str) -> bytes:
    """Tokens as a key takes them. RequestError if they are no whole numbers of 64 bits."""
    return whole_numbers(tokens, what).astype(_TOKEN, copy=False).tobytes()
