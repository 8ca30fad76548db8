"""In which order many engines are connected before the first load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.core.protocol.addresses import PeerAddress
from kvflow.errors import PeerUnreachable
from kvflow.runtime.peers.prewarm import prewarm


@pytest.mark.parametrize(("count", "list_offset", "first"), [(40, 0, 0), (40, 1234, 34), (40, 39, 39), (16, 1234, 0)])
async def test_readers_begin_at_different_engines_of_a_long_list(count: int, list_offset: int, first: int) -> None:
    """Decode engines that restart together have the same list: at each engine of it they would all come at once."""
    asked: list[str] = []

    async def ranks_at(engine: PeerAddress) -> Any:
        asked.append(engine.engine_id)
        raise PeerUnreachable("nobody", peer=engine.address)

    names = [f"e{number}" for number in range(count)]
    engines = [PeerAddress(engine_id=name, address=f"tcp://127.0.0.1:{5600 + at}") for at, name in enumerate(names)]
    reach: Any = SimpleNamespace(list_offset=list_offset, ranks_at=ranks_at)
    found = await prewarm(reach, peers=SimpleNamespace(), engines=engines)  # type: ignore[arg-type]
    assert asked == names[first:] + names[:first]
    assert [one.peer for one in found if isinstance(one, PeerUnreachable)] == [one.address for one in engines]
