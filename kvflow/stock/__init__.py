"""Fleets that have engines with vLLM's own NixlConnector in them: read from those, and be read by them.

`Runtime(config, foreign=StockPeers(...))` is all there is to it; without it nothing of this is imported. What is weaker
with such peers than among our own: see docs/stock.md.
"""

from kvflow.core.stock.deadline import Arrival, Terms
from kvflow.core.stock.params import StockTicket
from kvflow.stock.asking import ask_rank
from kvflow.stock.peers import StockPeers, arrival
from kvflow.stock.ranks import EngineRanks

__all__ = ["Arrival", "EngineRanks", "StockPeers", "StockTicket", "Terms", "arrival", "ask_rank"]
