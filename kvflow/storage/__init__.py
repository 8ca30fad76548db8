"""Blocks in files: a part that saves and restores them, `Runtime(config, parts=[Storage("blocks")])`.

requests  requests and reports                    shelf    the files of one rank: room, names, and their thread
moves     reads and writes of a file, by a flight store    the verbs
disk      the system's calls, on that thread      jobs     saves and restores under way, and their ends
storage   the part itself
"""

from kvflow.storage.storage import Storage
from kvflow.storage.storage_requests import RestoreReport, RestoreRequest, SaveReport, SaveRequest, StoreStatistics

__all__ = ["RestoreReport", "RestoreRequest", "SaveReport", "SaveRequest", "Storage", "StoreStatistics"]
