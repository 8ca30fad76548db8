"""`kvflow bench`, and the child processes of `kvflow bench`, `kvflow doctor` and `kvflow selftest`.

child     a child process that holds one rank, and the parent's calls to it over a pipe engine    a producer and a
consumer that run kvflow     cache     their caches, with a pattern to check loads against raw       a producer and a
reader on NIXL alone         transfer  `kvflow bench transfer`: kvflow beside raw NIXL loads     the blocks that each
load moves, pure         ucx       the path of reads, from UCX's log

Benchmarks for work on kvflow itself are in `tests/bench` and `tests/gpu`.
"""
