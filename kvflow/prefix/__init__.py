"""Prefixes: a part that finds a prompt's beginning in another engine's cache, `Runtime(config, parts=[Prefixes()])`.

prefixes         the part and its methods               keys            names of prefixes by their content
prefix_cache     an engine's own prefix cache           sharing         a shared one: its answers and leases
prefix_requests  requests, offers, reports, statistics  pull, search    one pull; the answers to one question
seek             questions to engines                   seek_request    the question on the wire
load_rates       measured speeds of loads               testing         a prefix cache for tests
kv_events        KV events of engines, followed and published, and the map that they feed
"""

from kvflow.prefix.keys import prefix_keys
from kvflow.prefix.prefix_cache import PinnedPrefix, PrefixCache, SharingStatistics
from kvflow.prefix.prefix_requests import PrefixAnswer, PrefixOffer, PrefixReport, PrefixRequest, PrefixStatistics
from kvflow.prefix.prefixes import Prefixes
from kvflow.prefix.sharing import SharedPrefixes

__all__ = [
    "PinnedPrefix",
    "PrefixAnswer",
    "PrefixCache",
    "PrefixOffer",
    "PrefixReport",
    "PrefixRequest",
    "PrefixStatistics",
    "Prefixes",
    "SharedPrefixes",
    "SharingStatistics",
    "prefix_keys",
]
