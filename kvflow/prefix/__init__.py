"""Reads the beginning of a prompt from another engine's prefix cache: `Runtime(config, parts=[Prefixes()])`.

prefixes         the class `Prefixes`                   keys            digests that name prefixes
prefix_cache     protocol of an engine's prefix cache   sharing         leases shared prefixes to peers
prefix_requests  requests, offers, reports, statistics  pull, search    one pull; one search and its answers
seek             asks engines for a prefix              seek_request    the message that asks
handing_on       hands prefixes on to a successor       hand_on_request the messages of that
load_rates       measured seconds per token of loads    testing         a prefix cache for tests
kv_events        follows and publishes KV events of engines; a map of prefixes to engines
"""

from kvflow.prefix.handing_on import HandedOnPrefix, HandOnReport
from kvflow.prefix.keys import prefix_keys
from kvflow.prefix.prefix_cache import PinnedPrefix, PrefixCache, SharingStatistics
from kvflow.prefix.prefix_requests import PrefixAnswer, PrefixOffer, PrefixReport, PrefixRequest, PrefixStatistics
from kvflow.prefix.prefixes import Prefixes
from kvflow.prefix.sharing import SharedPrefixes

__all__ = [
    "HandOnReport",
    "HandedOnPrefix",
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
