"""Exchange with stock engines, which run vLLM's own NixlConnector: read from stock producers, serve stock readers.

`Runtime(config, parts=[StockPeers(...)])` switches it on; otherwise nothing here is imported. docs/stock.md lists the
promises that are weaker with stock peers.
"""

from kvflow.stock.deadline import Arrival, Terms
from kvflow.stock.engine_ranks import EngineRanks
from kvflow.stock.metadata import ask_rank
from kvflow.stock.params import StockTicket
from kvflow.stock.stock_leases import arrival
from kvflow.stock.stock_peers import StockPeers

__all__ = ["Arrival", "EngineRanks", "StockPeers", "StockTicket", "Terms", "arrival", "ask_rank"]
