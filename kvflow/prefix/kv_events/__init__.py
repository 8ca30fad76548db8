"""KV events: follow the prefix caches of engines, to know which engines to ask for a prefix, and publish your own.

vLLM and SGLang publish these events (`--kv-events-config`); your own engine does so by a `Publisher`. A `Subscriber`
feeds a `PrefixMap` with the events of many engines.
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
