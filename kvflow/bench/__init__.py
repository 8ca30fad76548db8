"""What `kvflow bench` measures, as scenarios on one harness.

scenario  the harness: ranks are started, take turns, and a judge looks at the samples
child     a rank's process, and the one request and reply across its pipe
engine    a rank that runs kvflow                    cache     what ranks hold; every word says where it lies
loads     which blocks a load moves, pure            targets   promises and whether they were kept, pure
clocks    CPU time, and how late a loop is           busy      who computes meanwhile

transfer/ kvflow against raw NIXL                    topology  loads between ranks that cut the cache differently
peers/    kvflow against other libraries
fairness  small loads behind huge ones               planning  the planner, without any transfer
verifying loads with checksums beside loads without
flow/     leases that grow beside whole prompts, over links of different speed; many of them at once
fleet/    a thousand ranks of each kind, in virtual time

gpu/      experiments on a GPU machine, with a command of their own     ucx  what UCX says of the way of bytes, pure
"""
