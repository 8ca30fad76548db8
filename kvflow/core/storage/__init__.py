"""Decisions of a store of blocks, which touch no file: an entry's header, room and eviction, where blocks lie.

entry   the header of an entry's file      index   which entries there are, and who makes room for whom
placing where in a file blocks lie, as descriptors
"""
