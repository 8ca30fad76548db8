"""Settings of a seed: engines, limits, network and faults, all drawn from one random generator."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any

from kvflow.config import Config
from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.limits import Limits
from kvflow.testing.network_conditions import NetworkConditions, draw_conditions

MODEL_KV_HEADS = 2
LAYERS_MAX = 8
_WINDOW = 6
_WINDOWED_BLOCK_SIZE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model that all engines of a seed serve: the layers of their caches, and features that the run uses."""

    windows: bool = False
    """True if a group of layers attends to the last tokens only."""
    state: bool = False
    """True if a group of layers has state per request."""
    latent: bool = False
    """True if all heads share a latent, which every tensor-parallel rank has whole."""
    sharded: bool = False
    """True if some engines have the tokens of a latent on several ranks (decode context parallelism)."""
    layers: int = 1
    """Number of layers in each group. If above 1, some engines are pipelines."""
    priorities: bool = False
    device: bool = False
    """True if blocks are written some time after the engine's command, so that events are needed."""
    sleeps: bool = False
    """True if engines sleep: they unregister their cache, and register it again with other contents."""
    flips: bool = False
    """True if bytes are flipped on their way."""
    survives: bool = False
    """True if several engines offer the same prompt, and loads read from one engine after the other."""
    shares: bool = False
    """True if engines keep blocks of old prompts, share them, and pull prefixes from each other."""
    verifies: bool = False
    """True if loads are verified, some on request and some by chance."""

    def groups(self, shape: Shape) -> tuple[GroupFacts, ...]:
        """Return the groups of layers of an engine."""
        kind = GroupKind.SHARDED if shape.sharded else GroupKind.FULL
        found = [GroupFacts(name="full", block_size=shape.block_size, kind=kind)]
        if self.windows:
            sliding = GroupKind.SLIDING
            found.append(GroupFacts(name="local", block_size=_WINDOWED_BLOCK_SIZE, kind=sliding, window=_WINDOW))
        if self.state:
            found.append(GroupFacts(name="state", block_size=1, kind=GroupKind.STATE))
        return tuple(found)

    def layers_of(self, group: int, shape: Shape, pp_rank: int) -> list[int]:
        """Return the numbers of a group's layers in a pipeline stage."""
        groups, share = 1 + self.windows + self.state, self.layers // shape.pp_size
        return [layer * groups + group for layer in range(pp_rank * share, (pp_rank + 1) * share)]


PLAIN = Model()
_MODELS = {
    1: Model(shares=True),
    2: Model(flips=True, verifies=True),
    3: Model(windows=True, priorities=True),
    4: Model(latent=True, sharded=True),
    5: Model(shares=True),
    6: Model(windows=True, state=True, priorities=True),
    7: Model(latent=True),
    8: Model(windows=True, layers=2, sleeps=True),
    9: Model(device=True),
    10: Model(sleeps=True),
    11: Model(windows=True, layers=2),
    12: Model(flips=True, verifies=True, windows=True),
    13: Model(windows=True, device=True),
    14: Model(state=True, layers=2, priorities=True),
    15: Model(device=True, sleeps=True),
    16: Model(survives=True),
    17: Model(survives=True, sleeps=True),
    18: Model(shares=True),
    19: Model(shares=True, windows=True, priorities=True),
    20: Model(survives=True, windows=True),
    21: Model(survives=True, flips=True, verifies=True),
    22: Model(shares=True, windows=True, state=True, priorities=True),
    23: Model(shares=True, latent=True),
    24: Model(flips=True),
    25: Model(shares=True, device=True),
    26: Model(flips=True, verifies=True),
    27: Model(shares=True, windows=True, layers=2),
    28: Model(shares=True, sleeps=True),
    29: Model(windows=True, device=True),
    30: Model(shares=True, state=True, layers=2, priorities=True),
    31: Model(windows=True, state=True, device=True, flips=True, verifies=True),
}
"""Models by the remainder of the seed divided by 32. For other remainders engines serve plain full attention."""
_SEEDS = 32


def model_of(seed: int) -> Model:
    """Return the model that the engines of a seed serve."""
    return _MODELS.get(seed % _SEEDS, PLAIN)


def pauses(seed: int) -> bool:
    """Return whether machines are paused in the run of a seed: in a third of all seeds, with each model."""
    return seed // _SEEDS % 3 == 1


def retrains(seed: int) -> bool:
    """Return whether engines get new weights in the run of a seed: in a seventh of all seeds, with each model."""
    return seed // (3 * _SEEDS) % 7 == 6


def extends(seed: int) -> bool:
    """Return whether most loads of a seed get blocks while they run: in a fifth of all seeds, with each model."""
    return seed // (21 * _SEEDS) % 5 == 3


_VERIFY_SHARE = 0.7
_SURVIVED_WITHIN_S = 2.0
_SHARING_PEERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Settings of an engine: its role, how its cache is divided, and how its clock runs."""

    name: str
    serves: bool
    loads: bool
    tp_size: int
    pp_size: int
    order: str
    block_size: int
    num_blocks: int
    staged: bool
    scratch: str
    sharded: bool = False
    """True if the tokens of a block, `block_size` tokens, are divided among the tensor-parallel ranks."""
    clock_offset_s: float
    clock_rate: float
    """Rate of the engine's clock, mostly as `core.protocol.proof` assumes. Freshness must not depend on it."""

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings that a seed draws before the run starts. The run itself draws from the same generator."""

    seed: int
    model: Model
    shapes: tuple[Shape, ...]
    base: Config
    conditions: NetworkConditions
    requests: int
    span_s: float
    """Seconds during which requests and faults begin."""
    faults: int
    """Number of faults besides the network conditions: crashes, partitions, frozen engines and the like."""
    naps: int
    """Number of naps of engines."""
    pauses: int
    """Number of pauses of machines."""
    retrains: int
    """Number of times that an engine gets other weights."""

    def config(self, shape: Shape, host: str, index: int) -> Config:
        """Return the Config of the rank `index`. Ranks are counted stage by stage."""
        pp_rank, tp_rank = divmod(index, shape.tp_size)
        return replace(
            self.base,
            engine_id=shape.name,
            listen=f"tcp://{host}:5600",
            tp_rank=tp_rank,
            tp_size=shape.tp_size,
            pp_rank=pp_rank,
            pp_size=shape.pp_size,
            num_kv_heads=None if self.model.latent else MODEL_KV_HEADS,
            staging="always" if shape.staged else "auto",
            scratch=shape.scratch,
        )


def draw_settings(seed: int) -> tuple[Settings, random.Random]:
    """Return the settings of a seed, and the generator from which the run draws."""
    rng = random.Random(seed)
    count = rng.choice((2, 2, 3, 3, 4))
    if model_of(seed).survives or model_of(seed).shares:
        count = max(count, 3)
    alike = rng.random() < 0.6  # in most clusters all engines are divided alike
    common = _draw_shape(rng, 0, count)
    shapes = tuple(_draw_shape(rng, index, count, common if alike else None) for index in range(count))
    model = model_of(seed)
    if model is not PLAIN:
        shapes = tuple(_suited(rng, shape, model) for shape in shapes)
    base = _draw_base(rng)
    if model is not PLAIN:  # a load reads from all ranks of an engine, and an offer is staged with all its groups
        peers_max = max(base.limits.peers_max, *(shape.num_ranks for shape in shapes))
        limits = replace(base.limits, peers_max=peers_max)
        base = replace(base, limits=limits, host_buffer_bytes_max=4 * base.host_buffer_bytes_max)
    if model.shares:  # a pull reads from several engines at once, from all ranks of each
        base = replace(base, limits=replace(base.limits, peers_max=max(base.limits.peers_max, _SHARING_PEERS)))
    if model.survives:  # two engines serve, one loads, and loads have time for a second source
        shapes = tuple(replace(one, serves=at < count - 1 or one.serves) for at, one in enumerate(shapes))
        base = replace(base, load_deadline_s=_SURVIVED_WITHIN_S)
    if model.verifies:
        base = replace(base, verify_share=_VERIFY_SHARE)
    settings = Settings(
        seed=seed,
        model=model,
        shapes=shapes,
        base=base,
        conditions=draw_conditions(rng),
        requests=rng.randint(20, 40) // (3 if model.shares else 1),
        span_s=rng.uniform(0.3, 2.0),
        faults=rng.choice((0, 1, 2, 3, 4, 6)),
        naps=rng.randint(2, 8) if model.sleeps else 0,
        pauses=rng.randint(1, 6) if pauses(seed) else 0,
        retrains=rng.randint(2, 8) if retrains(seed) else 0,
    )
    return settings, rng


def _draw_shape(rng: random.Random, index: int, count: int, like: Shape | None = None) -> Shape:
    """Draw an engine. The first always serves, the last always loads, and the others do either or both."""
    both = rng.random() < 0.3
    serves = index == 0 or both or (index < count - 1 and rng.random() < 0.5)
    return Shape(
        name=f"engine-{index}",
        serves=serves,
        loads=index == count - 1 or both or not serves,
        tp_size=like.tp_size if like else rng.choice((1, 1, 1, 2)),
        pp_size=1,
        order=like.order if like else rng.choice(("NHD", "HND")),
        block_size=like.block_size if like else rng.choice((4, 4, 4, 8)),
        num_blocks=rng.choice((8, 12, 16)),
        staged=rng.random() < 0.1,
        scratch=rng.choice(("auto", "auto", "auto", "never", "always")),
        clock_offset_s=rng.uniform(0.0, 1e6),
        clock_rate=1.0 + rng.choice((1.0, 1.0, 1.0, 50.0)) * rng.uniform(-1e-4, 1e-4),
    )


def _suited(rng: random.Random, shape: Shape, model: Model) -> Shape:
    """Return `shape` with blocks for all groups of `model`, and with its layers divided among pipeline stages."""
    pp_size = rng.choice((1, 2)) if model.layers > 1 else 1
    if model.sharded:
        shape = replace(shape, tp_size=rng.choice((1, 2, 2, 4)), sharded=rng.random() < 0.7)
    return replace(shape, num_blocks=(4 if model.shares else 2) * shape.num_blocks, pp_size=pp_size)


def _draw_base(rng: random.Random) -> Config:
    drawn: dict[str, Any] = {
        "lease_ttl_s": rng.choice((0.05, 0.2, 1.0)),
        "lease_lifetime_s": rng.choice((0.5, 5.0)),
        "load_deadline_s": rng.choice((0.1, 0.5, 2.0)),
        "handshake_timeout_s": rng.choice((0.05, 0.2, 0.5)),
        "lease_wait_s": rng.choice((0.02, 0.1)),
        "peer_backoff_first_s": rng.choice((0.005, 0.05)),
        "peer_backoff_max_s": rng.choice((0.05, 1.0)),
        "peer_idle_s": rng.choice((0.02, 0.2, 600.0)),
        "peers_max": rng.choice((2, 1024)),
        "goodbye_timeout_s": rng.choice((0.005, 0.1)),
        "readers_max": rng.choice((1, 1024)),
        "cancel_grace_s": rng.choice((0.005, 0.05, 0.2)),
        "drain_timeout_s": rng.choice((0.05, 0.3)),
        "transport_close_timeout_s": rng.choice((0.1, 0.5)),
        "seal_hold_s": rng.choice((0.002, 0.01, 0.05)),
        "leases_max": 64,
        "source_ranks_max": 64,
        "slice_bytes_max": rng.choice((64, 256, 1024, 1 << 20)),
        "slices_in_flight_max": rng.choice((1, 2, 4)),
        "scratch_slot_bytes_max": rng.choice((1 << 10, 1 << 14)),
        "scratch_slots_max": rng.choice((1, 3)),
        "host_buffer_bytes_max": rng.choice((1 << 11, 1 << 16)),
    }
    limits = {entry.name: drawn.pop(entry.name) for entry in fields(Limits) if entry.name in drawn}
    return Config(engine_id="any", limits=Limits(**limits), **drawn)
