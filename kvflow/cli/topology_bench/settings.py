"""What one run of the topology bench measures, and which blocks a turn moves. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvflow.cli.bench.messages import Load
from kvflow.cli.bench.settings import MIB, SettingsError, Transport
from kvflow.cli.topology_bench.cuts import CASES, HEAD_SIZE, ITEMSIZE, MODEL_KV_HEADS, PARTS, Case, Cut

_WORD_BYTES = 4
_UNIT_TOKENS = max(cut.block_size for case in CASES for cut in (case.consumer, *case.producers))
_WORDS_MAX = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologySettings:
    """`tokens` are those of one load, `pool_tokens` those that each cache has room for."""

    transport: Transport
    cases: tuple[Case, ...]
    layers: int
    size_bytes: int
    tokens: int
    pool_tokens: int
    rounds: int
    quick: bool

    @property
    def consumers(self) -> tuple[Cut, ...]:
        """The ranks of the consumer's process."""
        return tuple(dict.fromkeys(case.consumer for case in self.cases))

    @property
    def producers(self) -> tuple[Cut, ...]:
        """The producer ranks, a process each."""
        return tuple(dict.fromkeys(cut for case in self.cases for cut in case.producers))

    def useful_bytes(self, cut: Cut) -> int:
        """What a load moves into this rank."""
        return self.tokens * self.layers * PARTS * cut.token_region_bytes

    def cache_bytes(self, cut: Cut) -> int:
        return self.pool_tokens * self.layers * PARTS * cut.token_region_bytes


def make_settings(
    *, transport: Transport, size_mb: int, rounds: int, layers: int, quick: bool, cases: tuple[Case, ...] = CASES
) -> TopologySettings:
    """Turn options into settings; `quick` replaces all amounts by the least that is meaningful."""
    if quick:
        size_mb, rounds, layers = 1, 2, 2
    token_bytes = layers * PARTS * cases[0].consumer.token_region_bytes
    tokens, rest = divmod(size_mb * MIB, token_bytes)
    if rest or not tokens or tokens % _UNIT_TOKENS:
        raise SettingsError(
            f"--size: {size_mb} MB is no multiple of {_UNIT_TOKENS} tokens, "
            f"which have {_UNIT_TOKENS * token_bytes} bytes"
        )
    # An eighth more than a load takes, so that it is scattered, and a unit for the load before it.
    units = tokens // _UNIT_TOKENS
    pool_tokens = _UNIT_TOKENS * (units + -(-units // 8) + 1)
    words = layers * PARTS * MODEL_KV_HEADS * pool_tokens * HEAD_SIZE * ITEMSIZE // _WORD_BYTES
    if words >= _WORDS_MAX:
        raise SettingsError(f"--size: {size_mb} MB is more than the pattern of 32 bits can tell apart")
    return TopologySettings(
        transport=transport,
        cases=cases,
        layers=layers,
        size_bytes=size_mb * MIB,
        tokens=tokens,
        pool_tokens=pool_tokens,
        rounds=rounds,
        quick=quick,
    )


def loads_of_turn(settings: TopologySettings, case: Case, turn: str) -> tuple[Load, Load]:
    """A small load that wakes everybody up, untimed, and the one that is measured; they share no block.

    All cases of a round move the same tokens, from and to the same blocks as far as they have blocks of one size.
    """
    local, remote = case.consumer.block_size, case.producers[0].block_size
    local_ids, remote_ids = (
        _pick_ids(settings, f"{turn} {side} {size}", size) for side, size in (("local", local), ("remote", remote))
    )
    wake, wake_remote = _UNIT_TOKENS // local, _UNIT_TOKENS // remote
    return (
        Load(request_id=f"{turn} {case.label} wake", local_ids=local_ids[:wake], remote_ids=remote_ids[:wake_remote]),
        Load(request_id=f"{turn} {case.label}", local_ids=local_ids[wake:], remote_ids=remote_ids[wake_remote:]),
    )


def _pick_ids(settings: TopologySettings, seed: str, block_size: int) -> tuple[int, ...]:
    rng = np.random.default_rng(list(seed.encode()))
    count = (settings.tokens + _UNIT_TOKENS) // block_size
    return tuple(rng.permutation(settings.pool_tokens // block_size)[:count].tolist())
