"""`kvflow bench`, and the child processes of `kvflow bench`, `kvflow doctor` and `kvflow selftest`.

child     a child process that holds one rank, and the parent's calls to it over a pipe
engine    a producer and a consumer that run kvflow, each in a child process
cache     the caches of both, with a pattern against which loads are checked
raw       a producer and a reader on NIXL alone, each in a child process
loads     the blocks that each load moves, pure
ucx       the path of reads, from UCX's log
transfer_bench   `kvflow bench transfer`: kvflow beside raw NIXL

Benchmarks for work on kvflow itself are in `tests/bench` and `tests/gpu`.
"""
