"""Storage: a part that saves blocks to files and restores them, `Runtime(config, parts=[Storage("blocks")])`.

storage           the part and its verbs               store         saves and restores of one registration
storage_requests  requests, reports and counts         stored_cache  blocks in memory, or through host buffers
store_transfer    one of them, moved by a flight       files         a thread that moves bytes; posix by NIXL
disk              the system's calls, on that thread
entry, index, placing: what a file holds, which there are, where blocks lie in one; without I/O
"""

from kvflow.storage.storage import Storage
from kvflow.storage.storage_requests import RestoreReport, RestoreRequest, SaveReport, SaveRequest, StoreStatistics

__all__ = ["RestoreReport", "RestoreRequest", "SaveReport", "SaveRequest", "Storage", "StoreStatistics"]
