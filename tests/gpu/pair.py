"""The pair of engines of each experiment, in processes of their own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from kvflow.bench.child import QUIET_ENVIRONMENT
from tests.support.engine import EngineSetup
from tests.support.engine_process import Call, EngineProcess, Engines
from tests.support.pools import PoolShape, scattered_ids
from tests.support.verbs import EngineError

CONFIG = {"load_deadline_s": 60.0}
PRODUCER_VALUE, READER_VALUE = 1.0, 0.0


class LoadEnd(NamedTuple):
    """The end of a load: `error` is the name of its exception, empty if the load succeeded."""

    seconds: float
    error: str = ""
    text: str = ""

    def succeeded(self) -> LoadEnd:
        """Return itself. A failed load ends the experiment."""
        if self.error:
            raise RuntimeError(f"a load failed: {self.error}: {self.text}")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A producer and a reader."""

    engines: Engines
    producer: EngineProcess
    reader: EngineProcess
    pool: PoolShape

    def offer(self, name: str, block_ids: Sequence[int]) -> Any:
        return self.producer.call("offer", request_id=name, block_ids=list(block_ids))

    def load(self, name: str, ticket: Any, block_ids: Sequence[int], verb: str = "load", **others: Any) -> LoadEnd:
        start_s = time.perf_counter()
        return self.ended(self.reader.start(verb, **request(name, ticket, block_ids), **others), start_s)

    def ended(self, loading: Call, start_s: float) -> LoadEnd:
        """Wait until the load has ended and nothing of it can land. The time of a failed load counts from `start_s`."""
        try:
            return LoadEnd(loading.result()["seconds"])
        except EngineError as error:
            self.reader.call("safe")
            return LoadEnd(time.perf_counter() - start_s, error.kind, str(error))

    def hand_over(self, name: str, remote_ids: Sequence[int], local_ids: Sequence[int]) -> LoadEnd:
        """Load computed blocks once."""
        end = self.load(name, self.offer(name, remote_ids), local_ids)
        if not end.error:
            self.producer.call("outcome", request_id=name)
        return end

    def times(self, name: str, count: int, repeats: int) -> list[float]:
        """Return the seconds of loads of `count` blocks in varying orders, without the first load, which connects."""
        orders = [scattered_ids(turn, self.pool.blocks, count) for turn in range(repeats + 2)]
        ends = [self.hand_over(f"{name} {turn}", *ids) for turn, ids in enumerate(pairwise(orders))]
        if wrong := self.reader.call("count_other", block_ids=orders[-1], value=PRODUCER_VALUE):
            raise RuntimeError(f"{name}: {wrong} of {count} blocks are not the producer's")
        return [end.succeeded().seconds for end in ends][1:]


def request(name: str, ticket: Any, block_ids: Sequence[int]) -> dict[str, Any]:
    """Return a load's request."""
    return {"request_id": name, "ticket": ticket, "block_ids": list(block_ids)}


@contextlib.contextmanager
def engines(
    producer: EngineSetup, reader: EngineSetup, environment: Mapping[str, str | None] | None = None
) -> Iterator[Pair]:
    """Both in processes of their own, and more like them; they end with the block.

    Where a device is measured, no process is forked.
    """
    fresh = reader.device.startswith("cuda")
    with Engines({**QUIET_ENVIRONMENT, **(environment or {})}, fresh=fresh) as started:
        both = started.start(producer, reader)
        yield Pair(engines=started, producer=both[0], reader=both[1], pool=reader.pool)


def specs(device: str, pool: PoolShape, **config: Any) -> tuple[EngineSetup, EngineSetup]:
    """A producer with a cache full of 1 and a reader with a cache full of 0, alike otherwise."""
    common: dict[str, Any] = {"device": device, "pool": pool, "config": {**CONFIG, **config}}
    return (
        EngineSetup(engine_id="producer", fill=PRODUCER_VALUE, **common),
        EngineSetup(engine_id="reader", fill=READER_VALUE, **common),
    )
