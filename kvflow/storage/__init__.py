"""Saves blocks to files and restores them. An optional part: `Runtime(config, parts=[Storage("blocks")])`.

storage           the part and its methods                  store         saves and restores of one registered cache
storage_requests  requests, reports and statistics          stored_cache  the memory that moves touch, and its digests
store_transfer    one save or restore, moved by a flight    files         the thread that moves bytes; posix: over NIXL
disk              the directory and its files, by system calls on that thread
entry, index, placing: format of a file, list of entries, places of blocks in a file; without I/O
"""

from kvflow.storage.storage import Storage
from kvflow.storage.storage_requests import RestoreReport, RestoreRequest, SaveReport, SaveRequest, StoreStatistics

__all__ = ["RestoreReport", "RestoreRequest", "SaveReport", "SaveRequest", "Storage", "StoreStatistics"]
