"""Prefixes of engines that are no asyncio programs: the verbs of the part, called from a thread."""

from __future__ import annotations

import pytest

from kvflow.errors import CacheUnregistered
from kvflow.prefix import Prefixes, PrefixReport, PrefixRequest, prefix_keys
from kvflow.prefix.testing import FakePrefixCache
from kvflow.runtime import runtime as asynchronous
from kvflow.transport.inproc import InprocNetwork
from tests.support.tests_support import WAIT_S
from tests.test_blocking import call_on_loop, on_loop, opened_pair

TOKENS = list(range(8))


def test_a_prefix_is_shared_pulled_and_reclaimed_from_any_thread() -> None:
    """The prefix cache is asked on the loop's thread."""
    ours, theirs, cache = Prefixes(), Prefixes(), FakePrefixCache(4)
    cache.put(TOKENS, [1, 2])
    with opened_pair(InprocNetwork(), parts=([theirs], [ours])) as pair:

        async def address(runtime: asynchronous.Runtime) -> str:
            return runtime.address

        def pull() -> PrefixReport:
            report: PrefixReport = on_loop(pair.consumer, lambda _: ours.pull(request))
            return report

        shared = call_on_loop(pair.producer, lambda: theirs.share(cache, pinned_blocks_max=2))
        peer = on_loop(pair.producer, address)
        request = PrefixRequest("req", prefix_keys(TOKENS, 4), 4, [5, 6], [peer], answer_within_s=WAIT_S)
        (offer,) = on_loop(pair.consumer, lambda _: ours.seek(request))
        assert (offer.num_tokens, cache.pins[1]) == (8, 1)
        assert call_on_loop(pair.producer, lambda: shared.reclaim(1)) == 2
        assert not +cache.pins
        assert pull().num_tokens == 8
        assert all(bool((layer[:, [5, 6]] == 1).all()) for layer in pair.cache.values())
        call_on_loop(pair.producer, shared.close)
        assert pull().num_tokens == 0
        pair.consumer.unregister()
        with pytest.raises(CacheUnregistered):
            pull()
