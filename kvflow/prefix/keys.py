"""Keys that name a prefix by its content: all engines compute the same keys for the same tokens.

The key of the first t tokens is one digest of 32 bytes over a salt and these tokens:

    key(t) = BLAKE2b-256( b"kvflow-prefix-1\\0" + u32le(len(salt)) + salt + int64le of each of tokens[0:t] )

So a key does not depend on the block size: engines with blocks of 16 and of 32 tokens compute equal keys at each
boundary that both have. Keys are computed from tokens, never from an engine's own block hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvflow.checks import instance, whole, whole_numbers
from kvflow.errors import RequestError

KEY_BYTES = 32
SALT_BYTES_MAX = 1024
_HASH_PREFIX = b"kvflow-prefix-1\0"
_TOKEN_DTYPE = np.dtype("<i8")


def prefix_keys(tokens: Sequence[int], block_tokens: int, *, salt: bytes = b"") -> list[bytes]:
    """Return one key for each full block of a prompt, for `PrefixRequest.keys` or `PrefixCache.match`.

    Args:
        tokens: token ids of the prompt. If prompts also differ in something else, such as an adapter or pictures,
            replace some ids by numbers that stand for the adapter or picture, in the same way on both engines.
        block_tokens: number of tokens between two keys. If two engines use different numbers, only prefixes that end
            where both have a key are found.
        salt: at most 1,024 bytes, such as a tenant's name. Only engines with the same salt share prefixes.

    Returns:
        One key of 32 bytes for each full block. Key i covers the first `(i + 1) * block_tokens` tokens.

    Raises:
        RequestError: `tokens` are no token ids, `block_tokens` is below 1, or `salt` is not bytes or is too long.
    """
    step = whole(block_tokens, "block_tokens", least=1) * _TOKEN_DTYPE.itemsize
    data = memoryview(token_bytes(tokens, "tokens"))
    state, keys = key_state(salt), list[bytes]()
    for start in range(0, len(data) - step + 1, step):
        state.update(data[start : start + step])
        keys.append(state.digest())
    return keys


def key_state(salt: bytes) -> hashlib.blake2b:
    """Return the hash state of an empty prompt.

    After `update(token_bytes(tokens))`, the state's `digest()` is the key of `tokens`. Raise RequestError if `salt` is
    not bytes, or is too long.
    """
    plain = instance(salt, bytes, "salt")
    if len(plain) > SALT_BYTES_MAX:
        raise RequestError(f"salt: expected at most {SALT_BYTES_MAX} bytes, got {len(plain)}")
    beginning = _HASH_PREFIX + len(plain).to_bytes(4, "little") + plain
    return hashlib.blake2b(beginning, digest_size=KEY_BYTES, usedforsecurity=False)


def token_bytes(tokens: Sequence[int], what: str) -> bytes:
    """Return `tokens` as little-endian 64-bit integers: the bytes from which keys are computed.

    Raise RequestError if a token is no integer. `what`: name of the argument, for the error message.
    """
    return whole_numbers(tokens, what).astype(_TOKEN_DTYPE, copy=False).tobytes()
