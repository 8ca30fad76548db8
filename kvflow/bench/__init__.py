"""The scenarios of `kvflow bench`, on one harness.

scenario  the harness: ranks are started, take turns, and a judge looks at the samples
child     a rank's process, and the one request and reply across its pipe
engine    a rank that runs kvflow                    cache     what ranks hold; every word says where it lies
loads     which blocks a load moves, pure            targets   promises and whether they were kept, pure
clocks    CPU time, and how late a loop is           busy      who computes meanwhile
ucx       what UCX says of the way of bytes

transfer/ kvflow against raw NIXL                    topology  loads between ranks that cut the cache differently
fairness  small loads behind huge ones

`kvflow doctor` and `kvflow selftest` use the same children and the same pair of engines. What only those measure who
work on kvflow is in `tests/bench` and `tests/gpu`.
"""
