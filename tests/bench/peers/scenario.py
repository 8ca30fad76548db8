"""The bench `peers`: the same loads through raw NIXL, kvflow and other libraries, taking turns.

Pairs, rounds, blocks and what is compared are as in `dev.py bench transfer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from kvflow.bench.cache import CacheShape
from kvflow.bench.loads import Fabric, SettingsError
from tests.bench.peers import results
from tests.bench.peers.contenders import ALWAYS, Absent, Peer, absent, ranks_of, runs_over
from tests.bench.scenario import Children, Outcome, RankSet, Samples, Turn
from tests.bench.transfer.sizes import LoadSize, parse_sizes, shape_for
from tests.bench.transfer.turns import pair_of, rounds_of_pair, turns_of_pairs

_QUIET = {"MC_LOG_LEVEL": "ERROR"}
_CHOICE = tuple(peer for peer in Peer if peer not in ALWAYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Compare raw NIXL and kvflow with Dynamo's nixl_connect and Mooncake's transfer engine, where they are installed.

    `python3 dev.py peers` runs this in an environment that has them.
    """

    transport: Annotated[Fabric | None, "Fabric that moves the bytes: shm, tcp (UCX_TLS=tcp); both if left out."] = None
    contenders: Annotated[str, "Who runs beside raw_tuned and kvflow, separated by commas; '' is nobody."] = ",".join(
        _CHOICE
    )
    sizes: Annotated[
        str, "What one load moves: 'block' or MB (2**20 bytes), separated by commas; 64x1 are 64 of 1 MB at once."
    ] = "block,1,16,64,64x1"
    pairs: Annotated[int, "How often every contender is started anew; equal processes differ in speed."] = 2
    rounds: Annotated[int, "Rounds per size, divided among the pairs; each gives every contender a turn."] = 4
    layers: Annotated[int, "Layers of the imaginary model."] = 8

    @property
    def transports(self) -> tuple[Fabric, ...]:
        return tuple(Fabric) if self.transport is None else (self.transport,)

    @property
    def chosen(self) -> tuple[Peer, ...]:
        """In their own order. SettingsError for a name that is none."""
        words = [word.strip() for word in self.contenders.split(",") if word.strip()]
        for word in words:
            if word not in tuple(Peer):
                raise SettingsError(f"--contenders: expected some of {', '.join(_CHOICE)}, got {word!r}")
        return tuple(peer for peer in Peer if peer in ALWAYS or peer in words)

    @property
    def load_sizes(self) -> tuple[LoadSize, ...]:
        return parse_sizes(self.sizes, self.layers)

    @property
    def shape(self) -> CacheShape:
        return shape_for(self.load_sizes, self.layers)

    def sets(self) -> Sequence[RankSet]:
        shares = [rounds_of_pair(self.rounds, self.pairs, pair) for pair in range(self.pairs)]
        shape, chosen = self.shape, self.chosen
        left_out = absent(chosen)
        found = (
            [RankSet(note="looking who is installed", turns=lambda _: _print_left_out(left_out))] if left_out else []
        )
        for transport in self.transports:
            here = [peer for peer in chosen if peer not in left_out and runs_over(peer, transport)]
            ranks = [rank for peer in here for rank in ranks_of(peer, shape)]
            found += [
                RankSet(
                    note=f"{transport}: pairs {pair + 1} of {self.pairs}: starting {len(ranks)} processes",
                    ranks=ranks,
                    turns=partial(self._turns, here, rounds, (transport, pair)),
                    environment={**transport.environment, **_QUIET},
                )
                for pair, rounds in enumerate(shares)
            ]
        return found

    def judge(self, samples: Samples) -> Outcome:
        sizes = {size: size.timed_blocks * self.shape.block_size_bytes for size in self.load_sizes}
        return results.judge(samples, sizes)

    def _turns(
        self, here: Sequence[Peer], rounds: range, key: tuple[Fabric, int], children: Children
    ) -> Iterator[Turn]:
        every = {peer: pair_of(peer, children) for peer in here}
        return turns_of_pairs(every, self.load_sizes, self.shape.blocks, rounds, key)


def _print_left_out(left_out: Mapping[Peer, Absent]) -> Iterator[Turn]:
    for peer, why in left_out.items():
        yield Turn(key=peer, run=partial(Absent, *why), note=f"{peer} is left out: {why.why}")
