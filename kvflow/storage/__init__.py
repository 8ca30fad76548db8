"""Storage: a part that saves blocks to files and restores them, `Runtime(config, parts=[Storage("blocks")])`.

storage           the part and its verbs               store       saves and restores of one registration
storage_requests  requests, reports and counts         jobs        those under way, and their ends
rank_files        the files of one rank, and its room  moves       reads and writes of a file, by a flight
disk              the system's calls, on one thread    files       that thread; posix moves bytes by NIXL
entry, index, placing: what a file holds, which there are, where blocks lie in one; without I/O
"""

from kvflow.storage.storage import Storage
from kvflow.storage.storage_requests import RestoreReport, RestoreRequest, SaveReport, SaveRequest, StoreStatistics

__all__ = ["RestoreReport", "RestoreRequest", "SaveReport", "SaveRequest", "Storage", "StoreStatistics"]
