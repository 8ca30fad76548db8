"""Blocks in files: `Runtime.save_blocks` and `restore_blocks`. Imported where Config.store_dir names a place.

requests  requests and reports                    shelf    the files of one rank: room, names, and their thread
moves     reads and writes of a file, by a flight store    the verbs
disk      the system's calls, on that thread      jobs     saves and restores under way, and their ends
"""
