"""Digests of KV bytes: one number per layer. Different bytes have equal digests only by chance.

A *run* is the bytes of one head of one token in one part (K, V, the latent) of a layer. Each run is hashed by a
multilinear hash. The digest of a layer is the sum of its runs' hashes, each multiplied by three weights: for the part,
for the token's position in the prompt, and for the head's index in the model. So a digest does not depend on the layout
of a cache, on the size of its blocks, on which blocks hold the prompt, or on how layers and heads are split among
ranks. But right bytes in a wrong place change the digest.

All arithmetic is modulo 2 ** 64, where int64 of numpy, of torch and of CUDA agree:

    hash(run)  = sum over j of word[j] * W[j]                         words are 8 bytes, little-endian, padded with 0
    fold(h)    = h xor (h >> 32)
    digest     = sum over parts p, tokens t, heads h of P[p] * T[t] * H[h] * fold(hash(run))

Weights are odd, so a change of one word of one run always changes the digest. Any other accident goes unseen with a
chance of some 2 ** -60. A digest is no protection against forgery: an attacker can make other bytes with the same
digest.

In cache formats in which the bytes of a token do not lie at a regular stride, a run is one head of a block, or a whole
block, with the position of the block's first token.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

UInt64Array: TypeAlias = npt.NDArray[np.uint64]

DIGEST_VERSION = 1
"""Version of this definition of a digest. A producer with another version refuses requests for digests."""

WORD_BYTES = 8
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_WORDS, _PARTS, _TOKENS, _HEADS = range(1, 5)  # kinds of weights


@lru_cache(maxsize=16)
def word_weights(count: int) -> UInt64Array:
    """Return the factors by which the hash of a run multiplies the run's `count` words. Do not change the array."""
    return _scrambled(np.arange(count), _WORDS)


def part_weights(count: int) -> UInt64Array:
    """Return the factors by which a digest multiplies the hashes of a layer's `count` parts (K, V, or the latent)."""
    return _scrambled(np.arange(count), _PARTS)


def token_weights(tokens: npt.NDArray[np.int64]) -> UInt64Array:
    """Return the factors by which a digest multiplies the hashes of tokens. `tokens`: positions in the prompt."""
    return _scrambled(tokens, _TOKENS)


def head_weights(start: int, count: int) -> UInt64Array:
    """Return the factors by which a digest multiplies the hashes of `count` heads, from the model's head `start` on."""
    return _scrambled(np.arange(start, start + count), _HEADS)


def _scrambled(numbers: npt.NDArray[np.int64], kind: int) -> UInt64Array:
    """Return an odd pseudo-random factor for each of `numbers`, by the finalizer of splitmix64.

    The factors differ between the kinds (words, parts, tokens, heads).
    """
    x = numbers.astype(np.uint64) + np.uint64((kind << 56) + 1)
    x *= np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def add_digests(total: int, more: int) -> int:
    """Return the sum of two partial digests of a layer, modulo 2 ** 64."""
    return (total + more) & _MASK
