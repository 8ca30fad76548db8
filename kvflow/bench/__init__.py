"""`kvflow bench`, and the processes that it, `kvflow doctor` and `kvflow selftest` start.

child     a process that holds one object, and the one request and reply across its pipe
engine    a producer and a consumer that run kvflow    cache     what ranks hold; every word says where it lies
raw       a producer and a reader on NIXL alone        transfer  `kvflow bench transfer`: both, and the ratio
loads     which blocks a load moves, pure              ucx       what UCX says of the way of bytes

What is measured for work on kvflow itself is in `tests/bench` and `tests/gpu`.
"""
