"""Saves blocks to files and restores them. An optional part: `Runtime(config, parts=[Storage("blocks")])`.

storage           the part and its methods                  store         saves and restores of one registered cache
storage_requests  requests, reports and statistics          stored_cache  the memory that moves touch, and its digests
store_transfer    one save or restore, moved by a flight    store_thread  the thread that moves bytes
posix             NIXL's POSIX backend for that thread      disk          the directory, by system calls
entry, index, placing: format of a file, list of entries, places of blocks in a file; without I/O
"""

from kvflow.storage.storage import Storage
from kvflow.storage.storage_requests import RestoreReport, RestoreRequest, SaveReport, SaveRequest, StoreStatistics

__all__ = ["RestoreReport", "RestoreRequest", "SaveReport", "SaveRequest", "Storage", "StoreStatistics"]
