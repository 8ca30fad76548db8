"""KV events: follow what engines' prefix caches hold, to know whom to ask for a prefix, and publish the same.

vLLM and SGLang publish such events (`--kv-events-config`); an engine of one's own does by a `Publisher`. A `Subscriber`
feeds a `PrefixMap` with those of many engines.
"""

from kvflow.core.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvflow.core.prefix.map import PrefixMap
from kvflow.kv_events.following import EventSource, SourceStatistics, Subscriber
from kvflow.kv_events.publishing import Publisher

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
