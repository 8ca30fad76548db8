"""Benches for work on kvflow itself: `python3 dev.py bench NAME`.

scenario  the harness: ranks are started, take turns, and a judge looks at the samples
targets   promises and whether they were kept, pure
commands  a command for each scenario, and its tables
clocks    CPU time, and how late a loop is           busy      processes that compute meanwhile

transfer/ kvflow against raw NIXL in three ways      topology  loads between ranks that cut the cache differently
fairness  small loads behind huge ones

flow      many leases that grow at once              pages     prompts of many pages of one token
fleet/    a thousand ranks of each kind, in virtual time
peers/    kvflow against other libraries, where they are installed: `python3 dev.py peers`
profiling where the time of small loads goes       surviving loads of several tickets whose producer dies
verifying loads with checksums beside others       never_idle loads beside a loop that is never idle
against   small loads with this kvflow and with another checkout's, in turns (small_loads is what they run)
pairs     a producer and a reader in processes of their own, as most of these have them

Beside them are the tests of these and of `kvflow.bench`.
"""
