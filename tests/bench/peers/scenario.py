"""The bench `peers`: the same loads through raw NIXL, kvflow and other libraries, taking turns.

Pairs, rounds, blocks and what is compared are as in `dev.py bench transfer`. For the rows other than speed each
contender is opened alone, since loads are cancelled and producers are killed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from kvflow.bench.cache import CacheShape
from kvflow.bench.child import BenchError, Child
from kvflow.bench.loads import Fabric, SettingsError, scattered_loads
from kvflow.checks import counted
from tests.bench.peers import results, trials
from tests.bench.peers.contenders import (
    ALWAYS,
    Absent,
    Conditions,
    Peer,
    absent,
    failing,
    measured_alone,
    ranks_of,
    runs_over,
)
from tests.bench.peers.results import Row
from tests.bench.scenario import Children, Outcome, RankSet, Samples, Turn
from tests.bench.transfer.sizes import LoadSize, parse_sizes, shape_for
from tests.bench.transfer.turns import pair_of, rounds_of_pair, turns_of_pairs

_CHOICE = tuple(peer for peer in Peer if peer not in ALWAYS)
_BLOCK = LoadSize("one block", 1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Compare raw NIXL and kvflow with other libraries that move blocks: speed, CPU, cancelling, failures.

    Rows other than speed are measured over tcp, or over the one transport that is chosen.
    `python3 dev.py peers` runs this in an environment that has them.
    """

    transport: Annotated[Fabric | None, "Fabric that moves the bytes: shm, tcp (UCX_TLS=tcp); both if left out."] = None
    contenders: Annotated[str, "Who runs beside raw_tuned and kvflow, separated by commas; '' is nobody."] = ",".join(
        _CHOICE
    )
    rows: Annotated[str, f"What is measured, separated by commas: {', '.join(Row)}."] = ",".join(Row)
    sizes: Annotated[
        str,
        "What one load moves: 'block' or MB (2**20 bytes), separated by commas; 64x1 are 64 of 1 MB at once, 256c are "
        "256 MB of neighbouring blocks.",
    ] = "block,1,16,256,256c,64x1"
    pairs: Annotated[int, "How often every contender is started anew; equal processes differ in speed."] = 2
    rounds: Annotated[int, "Rounds per size, divided among the pairs; each gives every contender a turn."] = 4
    layers: Annotated[int, "Layers of the imaginary model."] = 8
    same_ucx: Annotated[bool, "Give all contenders the frame size over tcp that kvflow sets for UCX."] = False
    cold_blocks: Annotated[str, "Blocks of 8 KiB of first loads, separated by commas."] = "16,1024,10000"
    idle_s: Annotated[float, "How long idle CPU is measured."] = 3.0
    broken_mb: Annotated[int, "Size of a load that is cancelled, or whose producer is killed or stopped."] = 256
    trials: Annotated[int, "Loads that are cancelled; half as many, at least one, whose producer is killed."] = 4
    bound_s: Annotated[float, "How long a load is waited for whose producer is killed; a fifth if it is stopped."] = (
        35.0
    )
    loads: Annotated[int, "Loads after which memory and files are looked at."] = 1000

    @property
    def transports(self) -> tuple[Fabric, ...]:
        return tuple(Fabric) if self.transport is None else (self.transport,)

    @property
    def chosen(self) -> tuple[Peer, ...]:
        """In their own order. SettingsError for a name that is none."""
        words = _words("--contenders", self.contenders, tuple(Peer), _CHOICE)
        return tuple(peer for peer in Peer if peer in ALWAYS or peer in words)

    @property
    def chosen_rows(self) -> tuple[Row, ...]:
        words = _words("--rows", self.rows, tuple(Row), tuple(Row))
        return tuple(row for row in Row if row in words)

    @property
    def load_sizes(self) -> tuple[LoadSize, ...]:
        return parse_sizes(self.sizes, self.layers)

    @property
    def cold_counts(self) -> tuple[int, ...]:
        words = [word.strip() for word in self.cold_blocks.split(",")]
        if not all(word.isdecimal() and int(word) for word in words):
            raise SettingsError(f"--cold-blocks: expected numbers and commas, got {self.cold_blocks[:80]!r}")
        return tuple(sorted({int(word) for word in words}))

    @property
    def shape(self) -> CacheShape:
        return shape_for(self.load_sizes, self.layers)

    def sets(self) -> Sequence[RankSet]:
        shares = [rounds_of_pair(self.rounds, self.pairs, pair) for pair in range(self.pairs)]
        chosen, rows = self.chosen, self.chosen_rows
        left_out = absent(chosen)
        last = self.transports[-1]
        able = [peer for peer in chosen if peer not in left_out and runs_over(peer, last)]
        left_out |= failing(able, Conditions(last, self.same_ucx))
        found = (
            [RankSet(note="looking who is installed", turns=lambda _: _print_left_out(left_out))] if left_out else []
        )
        for transport in self.transports:
            conditions = Conditions(transport, self.same_ucx)
            here = [peer for peer in chosen if peer not in left_out and runs_over(peer, transport)]
            if Row.SPEED in rows:
                found += self._speed(here, conditions, shares)
            alone = [row for row in rows if row is not Row.SPEED]
            if alone and transport is last:
                note = f"{transport}: {', '.join(alone)}: each contender alone"
                found.append(RankSet(note=note, turns=partial(self._alone, here, alone, conditions)))
        return found

    def judge(self, samples: Samples) -> Outcome:
        sizes = {size: size.timed_blocks * self.shape.block_size_bytes for size in self.load_sizes}
        return results.judge(samples, sizes)

    def _speed(self, here: Sequence[Peer], conditions: Conditions, shares: Sequence[range]) -> Iterator[RankSet]:
        ranks = [rank for peer in here for rank in ranks_of(peer, self.shape)]
        for pair, rounds in enumerate(shares):
            yield RankSet(
                note=f"{conditions.transport}: pairs {pair + 1} of {self.pairs}: starting {len(ranks)} processes",
                ranks=ranks,
                turns=partial(self._turns, here, rounds, (conditions.transport, pair)),
                environment=conditions.environment,
            )

    def _turns(
        self, here: Sequence[Peer], rounds: range, key: tuple[Fabric, int], children: Children
    ) -> Iterator[Turn]:
        """A contender that fails takes no further turns."""
        failed: set[Peer] = set()

        def tolerant(turn: Turn, peer: Peer) -> Turn:
            def run() -> object:
                if peer in failed:
                    return None
                try:
                    return turn.run()
                except BenchError as error:
                    if peer in ALWAYS:
                        raise
                    failed.add(peer)
                    return Absent(f"{turn.note.partition(':')[0]}: {error.reason}")

            return replace(turn, run=run)

        every = {peer: pair_of(peer, children) for peer in here}
        peers = {id(pair[0]): peer for peer, pair in every.items()}
        for turn in turns_of_pairs(every, self.load_sizes, self.shape.blocks, rounds, key):
            yield tolerant(turn, peers[id(turn.children[0])])

    def _alone(self, here: Sequence[Peer], rows: Sequence[Row], conditions: Conditions, _: Children) -> Iterator[Turn]:
        for row in rows:
            for peer in here:
                for key, shape, measure in self._trials(row, conditions.transport):
                    yield Turn(
                        key=(row, conditions.transport, peer, key),
                        run=partial(measured_alone, peer, conditions, shape, measure),
                        note=f"{conditions.transport}: {row}: {counted(len(here), 'contender')}",
                    )

    def _trials(self, row: Row, transport: Fabric) -> Iterator[tuple[int, CacheShape, Callable[[Child, Child], Any]]]:
        """What is measured for a row. Over shared memory a read needs nothing of the producer's process."""
        (size,) = parse_sizes(str(self.broken_mb), self.layers)
        size = size._replace(loads_per_turn=1)
        shape, small = shape_for([size], self.layers), CacheShape(layers=self.layers, blocks=101)
        match row:
            case Row.COLD:
                for count in self.cold_counts:
                    (load,) = scattered_loads(f"cold {count}", count + 1, [count])
                    yield count, replace(trials.COLD_SHAPE, blocks=count + 1), partial(trials.cold, load)
            case Row.IDLE:
                yield 0, small, partial(trials.idle, self.idle_s, _BLOCK, small.blocks)
            case Row.MEMORY:
                yield 0, small, partial(trials.growth, self.loads, small.blocks)
            case Row.CANCEL:
                yield 0, shape, partial(trials.cancels, self.trials, size, shape.blocks)
            case Row.KILLED if transport is Fabric.TCP:
                for _ in range(max(1, self.trials // 2)):
                    yield 0, shape, partial(trials.fault, signal.SIGKILL, self.bound_s, size, shape.blocks)
            case Row.STOPPED if transport is Fabric.TCP:
                yield 0, shape, partial(trials.fault, signal.SIGSTOP, self.bound_s / 5, size, shape.blocks)


def _words(option: str, text: str, known: Sequence[str], shown: Sequence[str]) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise SettingsError(f"{option}: expected some of {', '.join(shown)}, got {word!r}")
    return words


def _print_left_out(left_out: Mapping[Peer, Absent]) -> Iterator[Turn]:
    for peer, why in left_out.items():
        yield Turn(key=peer, run=partial(Absent, *why), note=f"{peer} is left out: {why.why}")
