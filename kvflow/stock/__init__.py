"""Fleets with engines that have vLLM's own NixlConnector: read from those, and be read by them.

`Runtime(config, parts=[StockPeers(...)])` switches it on; without it nothing of this is imported. Promises that are
weaker with such peers than among our own: docs/stock.md.
"""

from kvflow.stock.deadline import Arrival, Terms
from kvflow.stock.engine_ranks import EngineRanks
from kvflow.stock.metadata import ask_rank
from kvflow.stock.params import StockTicket
from kvflow.stock.stock_leases import arrival
from kvflow.stock.stock_peers import StockPeers

__all__ = ["Arrival", "EngineRanks", "StockPeers", "StockTicket", "Terms", "arrival", "ask_rank"]
