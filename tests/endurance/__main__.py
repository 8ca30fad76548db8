"""Endurance over real NIXL: `python -m tests.endurance --minutes 60`, from a checkout. Exit code 1 on any violation.

Fleets of processes, one for each transport, side by side: loads with everything drawn at random, faults between, many
leases at once; every byte is compared, and what the processes hold is sampled whenever all have come to rest.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import sys
import tempfile
from pathlib import Path

from tests.endurance.fleet import Fleet, Found, Process
from tests.endurance.samples import grown_kinds, growth
from tests.support.engine_process import TRANSPORTS

LOADS = 200_000


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.endurance", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--loads", type=int, default=LOADS, help="it goes on until as many have ended, in all")
    parser.add_argument("--leases", type=int, default=10_000, help="open at once, three times in a run")
    parser.add_argument("--transport", choices=[*TRANSPORTS, "both"], default="both")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=16, help="loads at once, of each transport")
    parser.add_argument("--sample-s", type=float, default=30.0)
    parser.add_argument("--json", type=Path, default=Path("endurance.json"))
    parser.add_argument("--verbose", action="store_true", help="tell of each fault")
    options = parser.parse_args(arguments)
    logging.basicConfig(level="DEBUG" if options.verbose else "INFO", format="%(message)s")
    transports = list(TRANSPORTS) if options.transport == "both" else [options.transport]
    with tempfile.TemporaryDirectory(prefix="kvflow-endurance-") as folder:
        for transport in transports:
            (Path(folder) / transport).mkdir()
        found = asyncio.run(_run_all(options, transports, Path(folder)))
    verdict = judge(found)
    options.json.write_text(json.dumps({"options": vars(options), **verdict}, indent=1, default=str))
    print(table(verdict))
    return 1 if verdict["violations"] else 0


async def _run_all(options: argparse.Namespace, transports: list[str], folder: Path) -> dict[str, Found]:
    share = options.loads // len(transports)
    runs = (_run_one(options, transport, share, folder / transport) for transport in transports)
    return dict(zip(transports, await asyncio.gather(*runs), strict=True))


async def _run_one(options: argparse.Namespace, transport: str, loads: int, folder: Path) -> Found:
    common = {"seed": options.seed, "workers": options.workers}
    names = {"producer": "producer", "consumer": "consumer", "side": "consumer"}
    engines = {name: Process(folder, name, role, TRANSPORTS[transport]) for name, role in names.items()}
    producer, consumer, side = engines.values()
    await producer.start(seed=options.seed)
    reads = {"producer": str(producer.path)}
    await consumer.start(**common, **reads, first=0, engine_id="consumer", store_dir=str(folder / "store"))
    fleet = Fleet(producer, consumer, side, seed=options.seed, leases=options.leases, quiet=transport == "tcp")
    fleet.side_options = {
        **reads,
        "seed": options.seed,
        "workers": max(options.workers // 4, 1),
        "engine_id": "side",
        "store_dir": str(folder / "side-store"),
    }
    found = await fleet.run(options.minutes * 60, loads, every_s=options.sample_s, fault_s=2.0)
    for engine in (side, consumer, producer):
        problem = await engine.close()
        if problem:
            found.violations.append(problem)
    return found


def judge(found: dict[str, Found]) -> dict[str, object]:
    """Return the results, with the growing resources among the violations."""
    violations, told = [], {}
    for transport, one in found.items():
        violations += [f"{transport}: {what}" for what in one.violations]
        numbers = {}
        for name, samples in one.samples.items():
            if len(samples) < 4:
                continue
            numbers[name] = growth(samples)
            for what, number in numbers[name].items():
                if not number["flat"]:
                    grown = grown_kinds(samples) if "objects" in what else ""
                    text = f"{what} of the {name} grow from {number['first third']} to {number['last third']} {grown}"
                    violations.append(f"{transport}: {text}")
        told[transport] = {**dataclasses.asdict(one), "growth": numbers}
        del told[transport]["violations"]
    return {"violations": violations, "transports": told}


def table(verdict: dict[str, object]) -> str:
    """For people."""
    lines = []
    for transport, one in verdict["transports"].items():  # type: ignore[attr-defined]
        rate = one["loads"] / max(one["seconds"], 1.0)
        lines.append(f"{transport}: {one['loads']} loads in {one['seconds']:.0f} s ({rate:.0f} a second)")
        for what in ("outcomes", "features", "leases"):
            lines.append(f"  {what}: {_listed(one['outcomes'].get(what, {}))}")
        lines.append(f"  faults: {_listed(one['faults'])}")
        lines += [f"  {leases}" for leases in one["leases"]]
        for name, numbers in one["growth"].items():
            for what, number in numbers.items():
                before, after = number["first third"], number["last third"]
                lines.append(f"  {name:9} {what:15} {before:12.1f} {after:12.1f}  {'' if number['flat'] else 'GROWS'}")
    violations = verdict["violations"]
    lines += [f"VIOLATION {what}" for what in violations]  # type: ignore[attr-defined]
    lines.append(f"{len(violations)} violations")  # type: ignore[arg-type]
    return "\n".join(lines)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
