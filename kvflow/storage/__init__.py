"""Saves blocks to files and restores them. Optional feature of a runtime: `Runtime(config, parts=[Storage("blocks")])`.

storage           the class `Storage`                       store         saves and restores of one registered cache
storage_requests  requests, reports and statistics          stored_cache  memory to copy to and from files, and digests
store_transfer    one save or restore                       store_thread  I/O thread that copies bytes and opens files
posix             NIXL's POSIX backend for that thread      disk          the store's directory, by system calls
entry, index, placing: format of a file, list of saved files, offsets of blocks in a file; without I/O
"""

from kvflow.storage.storage import Storage
from kvflow.storage.storage_requests import RestoreReport, RestoreRequest, SaveReport, SaveRequest, StoreStatistics

__all__ = ["RestoreReport", "RestoreRequest", "SaveReport", "SaveRequest", "Storage", "StoreStatistics"]
