"""The bench `verifying`: the same loads without and with checksums (`LoadRequest.verify`), taking turns.

A producer and a reader, whose digests are computed at the same time, so on a machine of two cores each has one. Blocks
are scattered on both sides. The model is that of `kvflow bench transfer`: K or V of a block of one layer is 32 KiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from kvflow.bench.cache import CacheShape
from kvflow.bench.child import BenchError, RankProcess
from kvflow.bench.engine import EngineProducer, config_of, open_producer
from kvflow.bench.loads import MIB, Fabric, PlannedLoad, SettingsError, scattered_loads
from tests.bench.consumers import Consumers, LoadResult, open_consumers
from tests.bench.scenario import Children, Outcome, RankSet, Samples, Turn, interleaved
from tests.bench.targets import Spread, TargetRow, at_least

SPEED_RATIO_MIN = 0.5
_LEGEND = (
    "Each round has one load of a size without checksums and one with. Ratios are of speed, verified to not, within "
    "each round. All bytes of one load of each kind were compared, then a layer of each."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeResult:
    """Loads of one size."""

    size: str
    size_bytes: int = field(repr=False)
    plain_s: Spread
    verified_s: Spread
    plain_gb_per_s: float
    verified_gb_per_s: float
    ratio: Spread
    checked_bytes: int = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifying:
    """Compare loads without and with checksums of all their bytes."""

    transport: Annotated[Fabric, "Fabric that moves the bytes: shm or tcp (UCX_TLS=tcp)."] = Fabric.SHM
    sizes: Annotated[str, "What one load moves in MB (2**20 bytes), separated by commas."] = "1,16,64,256"
    rounds: Annotated[int, "Loads of each size, without checksums and with."] = 15
    layers: Annotated[int, "Layers of the imaginary model."] = 8

    @property
    def blocks(self) -> dict[str, int]:
        """How many blocks a load of each size has, smallest first."""
        block_bytes = CacheShape(layers=self.layers, blocks=1).block_size_bytes
        found = {}
        for word in self.sizes.split(","):
            count, rest = divmod(int(word) * MIB, block_bytes) if word.strip().isdecimal() else (0, 0)
            if rest or not count:
                raise SettingsError(f"--sizes: {word!r} MB is no multiple of a block, which has {block_bytes} bytes")
            found[f"{word.strip()} MB"] = count
        return dict(sorted(found.items(), key=lambda entry: entry[1]))

    @property
    def shape(self) -> CacheShape:
        """An eighth more than the largest load takes, so that it is scattered."""
        most = max(self.blocks.values())
        return CacheShape(layers=self.layers, blocks=most + -(-most // 8)).checked("--sizes")

    def sets(self) -> Sequence[RankSet]:
        shape = self.shape
        ranks = [
            RankProcess("producer", partial(open_producer, config_of("producer"), shape)),
            RankProcess("consumer", partial(open_consumers, [(config_of("consumer"), shape)])),
        ]
        note = f"{self.transport}: starting {len(ranks)} ranks"
        return [RankSet(note=note, ranks=ranks, turns=self._turns, environment=self.transport.environment)]

    def judge(self, samples: Samples) -> Outcome:
        loads = samples.of(LoadResult)
        results = [self._result(size, *(loads[size, verify] for verify in (False, True))) for size in self.blocks]
        return Outcome(results={"sizes": results}, legend=_LEGEND, targets=[target(results)])

    def _turns(self, children: Children) -> Iterator[Turn]:
        for size in self.blocks:
            for verify in (False, True):
                run = partial(self._hand_over, children, self.planned(size, f"check {verify}"), verify=verify)
                yield Turn(key=(size, verify), run=run, note=f"{size}: every byte compared, then {self.rounds} rounds")
            for index, verify in interleaved((False, True), range(self.rounds)):
                load, layers = self.planned(size, f"round {index} {verify}"), (index % self.layers,)
                run = partial(self._hand_over, children, load, layers=layers, verify=verify)
                yield Turn(key=(size, verify), run=run)

    def _hand_over(
        self, children: Children, load: PlannedLoad, *, verify: bool, layers: Sequence[int] | None = None
    ) -> LoadResult:
        """Offer, load, compare every byte of some layers, all if left out, and see that the lease has ended as read."""
        producer, consumer = children["producer"], children["consumer"]
        layers = range(self.layers) if layers is None else layers
        consumer.run(Consumers.poison, 0, load, layers)
        tickets = producer.run(EngineProducer.offer, [load])
        result = consumer.run(Consumers.load, 0, load, tickets, verify=verify)
        checked_bytes = consumer.run(Consumers.check, 0, load, self.shape.block_size, layers)
        producer.run(EngineProducer.end_leases)
        return result._replace(checked_bytes=checked_bytes)

    def planned(self, size: str, turn: str) -> PlannedLoad:
        """The load of a turn: both of a round move blocks that are scattered alike."""
        name = f"{size} {turn}"
        seed = name.removesuffix(" True").removesuffix(" False")
        (load,) = scattered_loads(name, self.shape.blocks, [self.blocks[size]], seed=seed)
        return load

    def _result(self, size: str, plain: Sequence[LoadResult], verified: Sequence[LoadResult]) -> SizeResult:
        size_bytes = self.blocks[size] * self.shape.block_size_bytes
        for first in (plain[0], verified[0]):
            if first.checked_bytes != size_bytes:
                raise BenchError(f"{size}: {first.checked_bytes} bytes compared of {size_bytes}")
        plain_s, verified_s = (Spread.of([load.seconds for load in loads[1:]]) for loads in (plain, verified))
        pairs = zip(plain[1:], verified[1:], strict=True)
        return SizeResult(
            size=size,
            size_bytes=size_bytes,
            plain_s=plain_s,
            verified_s=verified_s,
            plain_gb_per_s=size_bytes / plain_s.p50 / 1e9,
            verified_gb_per_s=size_bytes / verified_s.p50 / 1e9,
            ratio=Spread.of([one.seconds / other.seconds for one, other in pairs]),
            checked_bytes=sum(load.checked_bytes for load in (*plain, *verified)),
        )


def target(results: Sequence[SizeResult]) -> TargetRow:
    """Small loads are dominated by the question; the promise is of what takes time."""
    large = [(result.ratio.p50, result.size) for result in results if result.size_bytes >= 16 * MIB]
    return at_least("16 MB and more, speed with checksums to without", SPEED_RATIO_MIN, large)
