"""Fleets with engines that have vLLM's own NixlConnector: read from those, and be read by them.

`Runtime(config, foreign=StockPeers(...))` switches it on; without it nothing of this is imported. Promises that are
weaker with such peers than among our own: docs/stock.md.
"""

from kvflow.core.stock.deadline import Arrival, Terms
from kvflow.core.stock.params import StockTicket
from kvflow.stock.asking import ask_rank
from kvflow.stock.peers import StockPeers, arrival
from kvflow.stock.ranks import EngineRanks

__all__ = ["Arrival", "EngineRanks", "StockPeers", "StockTicket", "Terms", "arrival", "ask_rank"]
