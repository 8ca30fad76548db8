"""Digests of KV bytes: one number per layer, equal on two engines exactly if, but for chance, the bytes are.

What is digested are *runs*: the bytes of one head of one token in one part (K, V, the latent) of a layer. A run is
hashed by a multilinear hash, and enters the sum of its layer with a weight for its part, its token of the prompt and
its head of the model. So a digest does not depend on how a cache is laid out, how large its blocks are, in which blocks
the prompt lies and how ranks are cut; but right bytes in a wrong place change it.

All arithmetic is modulo 2 ** 64, where int64 of numpy, of torch and of CUDA agree:

    hash(run)  = sum over j of word[j] * W[j]                         words are 8 bytes, little-endian, padded with 0
    fold(h)    = h xor (h >> 32)
    digest     = sum over parts p, tokens t, heads h of P[p] * T[t] * H[h] * fold(hash(run))

Weights are odd, so a change of one word of one run always changes the digest; other accidents go unseen with a chance
of some 2 ** -60. It is a checksum, not a seal against forgery: who wants to can make other bytes with the same digest.

Formats whose bytes mean more than values at strides are digested in the pieces that are moved: heads of a block, or
whole blocks, with the block's first token as their token.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

UInt64Array: TypeAlias = npt.NDArray[np.uint64]

DEFINITION = 1
"""Number of this definition of a digest; a producer that knows another one refuses the question."""

WORD_BYTES = 8
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_WORDS, _PARTS, _TOKENS, _HEADS = range(1, 5)  # which weights


@lru_cache(maxsize=16)
def word_weights(count: int) -> UInt64Array:
    """Return the weights of the `count` words of a run, which nobody may change."""
    return _scrambled(np.arange(count), _WORDS)


def part_weights(count: int) -> UInt64Array:
    """Return the weights of K, V, or whichever parts a layer has."""
    return _scrambled(np.arange(count), _PARTS)


def token_weights(tokens: npt.NDArray[np.int64]) -> UInt64Array:
    """Return the weights of tokens, by their places in the prompt."""
    return _scrambled(tokens, _TOKENS)


def head_weights(start: int, count: int) -> UInt64Array:
    """Return the weights of `count` of the model's heads from `start` on."""
    return _scrambled(np.arange(start, start + count), _HEADS)


def _scrambled(numbers: npt.NDArray[np.int64], kind: int) -> UInt64Array:
    """Odd numbers that look like chance, one for each (the finalizer of splitmix64)."""
    x = numbers.astype(np.uint64) + np.uint64((kind << 56) + 1)
    x *= np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def added(total: int, more: int) -> int:
    """Return the sum of two digests."""
    return (total + more) & _MASK
