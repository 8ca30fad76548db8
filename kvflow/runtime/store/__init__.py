"""Blocks in files: what `Runtime.save_blocks` and `restore_blocks` do. Loaded where Config.store_dir names a place.

requests  what is asked for, and reported        shelf    the files of one rank: room, names, and the thread they are on
transit   one save's or restore's moves          store    the verbs
disk      the system's calls, on that thread     jobs     what is under way, and what becomes of it
"""
