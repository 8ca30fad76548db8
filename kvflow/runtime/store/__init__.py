"""Blocks in files: what `Runtime.save_blocks` and `restore_blocks` do. Loaded where Config.store_dir names a place.

requests  what is asked for, and reported        shelf    the files of one rank: room, names, and the thread they are on
moves     what a flight's moves are of a file    store    the verbs
disk      the system's calls, on that thread     jobs     what is under way, and what becomes of it
"""
