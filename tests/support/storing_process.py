"""A process that saves block after block until it is killed: `python -m tests.support.storing_process FOLDER hold|run`.

The process prints the number of each save in a line; the blocks of save n are full of n. With `hold`, the moves of the
second save never end.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

from tests.support.storing import storing

BLOCKS = (1, 2, 3)


async def main(folder: Path, mode: str) -> None:
    async with storing(folder) as engine:
        for number in itertools.count():
            if mode == "hold" and number == 1:
                engine.mover.gate.clear()
            engine.fill(BLOCKS, number)
            await engine.save(str(number), BLOCKS, deadline_s=3600.0)
            print(number, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
