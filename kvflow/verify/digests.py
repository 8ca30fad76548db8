"""Digests of KV bytes: one number per layer. Equal bytes give equal digests; different bytes do so only by chance.

*Runs* are digested: the bytes of one head of one token in one part (K, V, the latent) of a layer. A run is hashed by a
multilinear hash, and enters the sum of its layer with three weights: for its part, for its token's position in the
prompt, and for its head of the model. So a digest does not depend on the layout of a cache, on the size of its blocks,
on which blocks hold the prompt, or on how ranks are cut. But right bytes in a wrong place change it.

All arithmetic is modulo 2 ** 64, where int64 of numpy, of torch and of CUDA agree:

    hash(run)  = sum over j of word[j] * W[j]                         words are 8 bytes, little-endian, padded with 0
    fold(h)    = h xor (h >> 32)
    digest     = sum over parts p, tokens t, heads h of P[p] * T[t] * H[h] * fold(hash(run))

Weights are odd, so a change of one word of one run always changes the digest. Any other accident goes unseen with a
chance of some 2 ** -60. A digest is a checksum, and no protection against forgery: an attacker can make other bytes
with the same digest.

Some formats have bytes that are not values at strides. They are digested in the pieces that are moved: heads of a
block, or whole blocks, with the block's first token as their token.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

UInt64Array: TypeAlias = npt.NDArray[np.uint64]

DIGEST_VERSION = 1
"""Version of this definition of a digest. A producer with another version refuses the question."""

WORD_BYTES = 8
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_WORDS, _PARTS, _TOKENS, _HEADS = range(1, 5)  # kinds of weights


@lru_cache(maxsize=16)
def word_weights(count: int) -> UInt64Array:
    """Return the weights of the `count` words of a run, in an array that must not be changed."""
    return _scrambled(np.arange(count), _WORDS)


def part_weights(count: int) -> UInt64Array:
    """Return the weights of `count` parts of a layer: K, V, or the latent."""
    return _scrambled(np.arange(count), _PARTS)


def token_weights(tokens: npt.NDArray[np.int64]) -> UInt64Array:
    """Return the weights of tokens, by their positions in the prompt."""
    return _scrambled(tokens, _TOKENS)


def head_weights(start: int, count: int) -> UInt64Array:
    """Return the weights of `count` heads of the model, from head `start` on."""
    return _scrambled(np.arange(start, start + count), _HEADS)


def _scrambled(numbers: npt.NDArray[np.int64], kind: int) -> UInt64Array:
    """Return an odd pseudo-random weight for each number and kind of weight, by the finalizer of splitmix64."""
    x = numbers.astype(np.uint64) + np.uint64((kind << 56) + 1)
    x *= np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def add_digests(total: int, more: int) -> int:
    """Return the sum of two digests, modulo 2 ** 64."""
    return (total + more) & _MASK
