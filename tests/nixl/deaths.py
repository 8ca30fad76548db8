"""How often does a producer die because its reader did? Over tcp UCX may abort the process that is read from.

    python tests/nixl/deaths.py --rounds 20 UCX_TCP_MAX_POLL=1

kills readers with SIGKILL in the middle of reads, at random moments, while the producer is free, has its GIL held, or
is stopped; with the progress thread of kvflow's serving agent and without it; and counts the producers that died. A
round kills four readers of one producer. Variables of UCX that are named apply to all processes.

What happens there: UCX emulates a read over tcp by a request and a reply. A producer that finds a request in its socket
whose sender is gone by then fails to send the reply, and UCX takes that for an impossible error. So the moment between
the arrival of a request and its answer is dangerous, and progress that nothing holds up is what keeps it short.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from engine_main import BLOCK_BYTES, EngineSetup, run_engine
from engine_process import TRANSPORTS, EngineProcess, Engines

READERS = 4
NUM_BLOCKS = 1024
LIMITS = {"slice_bytes_max": BLOCK_BYTES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What the producer is like when its readers die."""

    name: str
    run: Callable[..., None] = run_engine
    hold_gil: bool = False
    stop: bool = False
    answers: bool
    """Whether reads go on meanwhile; if not, readers are killed at one of the first reads."""


def run_without_progress_thread(*arguments: object) -> None:
    """An engine whose serving agent moves on only when its owner thread polls it."""
    from kvflow.transport.nixl import agents

    class Agent(agents._Agent):
        def __init__(self, *arguments: object, progress: bool) -> None:
            super().__init__(*arguments, progress=False)

    agents._Agent = Agent
    run_engine(*arguments)


SCENES = (
    Scene(name="progress thread, Python free", answers=True),
    Scene(name="progress thread, GIL held", hold_gil=True, answers=True),
    Scene(name="no progress thread, Python free", run=run_without_progress_thread, answers=True),
    Scene(name="no progress thread, GIL held", run=run_without_progress_thread, hold_gil=True, answers=False),
    Scene(name="process stopped", stop=True, answers=False),
)


def count_deaths(scene: Scene, environment: Mapping[str, str], rounds: int, random: Random) -> int:
    """Kill `READERS` readers in each round; in how many of them the producer died of it."""
    deaths = 0
    with Engines(environment) as engines:
        producer = None
        for round_ in range(rounds):
            if producer is None:
                (producer,) = engines.start(
                    EngineSetup(engine_id="producer", num_blocks=NUM_BLOCKS, limits=LIMITS), run=scene.run
                )
            readers = engines.start(
                *(
                    EngineSetup(engine_id=f"reader-{index}", num_blocks=NUM_BLOCKS, limits=LIMITS)
                    for index in range(READERS)
                )
            )
            try:
                kill_while_reading(scene, producer, readers, round_, random)
                producer.call("statistics")
            except (ConnectionError, TimeoutError):
                assert producer.wait_for_exit() not in (None, 0)
                deaths += 1
                producer = None
    return deaths


def kill_while_reading(
    scene: Scene, producer: EngineProcess, readers: list[EngineProcess], round_: int, random: Random
) -> None:
    """ConnectionError if the producer dies of it."""
    blocks = list(range(NUM_BLOCKS))
    tickets = []
    for index, reader in enumerate(readers):  # one short load first, so that all are connected
        name = f"{round_}-{index}"
        warm_up = producer.call("offer", request_id=f"warm-up-{name}", block_ids=[0])
        reader.call("load", request_id="warm up", ticket=warm_up, block_ids=[0])
        tickets.append(producer.call("offer", request_id=name, block_ids=blocks))
    if scene.hold_gil:
        stall = producer.stall(hold_gil=True)
        producer.wait_until_stalled()
    if scene.stop:
        producer.stop()
    for reader, ticket in zip(readers, tickets, strict=True):
        more = random.randint(1, NUM_BLOCKS // 2 if scene.answers else 4)
        reads = reader.call("statistics")["transport"]["reads"] + more
        reader.start("load", request_id="r", ticket=ticket, block_ids=blocks)
        reader.wait_until(partial(has_read, reads=reads))
        reader.close()
    if scene.hold_gil:
        producer.go_on()
        stall.result()
    producer.resume()
    for index in range(len(readers)):
        producer.call("revoke", request_id=f"{round_}-{index}")
    producer.wait_until(lambda statistics: statistics["serving"]["open_leases"] == 0)


def has_read(statistics: dict[str, Any], *, reads: int) -> bool:
    """So many reads were posted, or the producer has died before."""
    return bool(statistics["transport"]["reads"] >= reads or statistics["loading"]["failed"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("environment", nargs="*", metavar="UCX_NAME=VALUE")
    options = parser.parse_args()
    environment = {**TRANSPORTS["tcp"], **dict(entry.split("=", 1) for entry in options.environment)}
    for scene in SCENES:
        deaths = count_deaths(scene, environment, options.rounds, Random(options.seed))
        print(f"{scene.name:34} the producer died in {deaths} of {options.rounds} rounds", flush=True)


if __name__ == "__main__":
    main()
