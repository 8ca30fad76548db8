"""KV events: messages in which an engine publishes the blocks that its prefix cache stores and removes.

vLLM and SGLang publish KV events (`--kv-events-config`); your own engine does so by a `Publisher`. A `Subscriber`
applies the events of many engines to a `PrefixMap`, which names the engines to ask for a prefix.
"""

from kvflow.prefix.kv_events.batches import AllBlocksCleared, BlockRemoved, BlockStored
from kvflow.prefix.kv_events.following import EventSource, SourceStatistics, Subscriber
from kvflow.prefix.kv_events.prefix_map import PrefixMap
from kvflow.prefix.kv_events.publishing import Publisher

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventSource",
    "PrefixMap",
    "Publisher",
    "SourceStatistics",
    "Subscriber",
]
