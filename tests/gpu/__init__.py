"""Experiments on a machine with a GPU, E0 to E15: `python3 dev.py gpu`, ten minutes at most, the most valuable first.

conftest: options, limits, lines of JSON. engine: a rank that runs kvflow on a device, and pairs of ranks.
test_experiments: what is asked, and what is expected. raw: a rank that runs bare NIXL. device, pool: a device that
computes later, and a cache in its memory.
"""
