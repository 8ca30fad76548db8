"""Benches for those who work on kvflow, on the harness of `kvflow.bench`: `python3 dev.py bench NAME`.

flow/     leases that grow beside whole prompts, over links of different speed; many of them at once
fleet/    a thousand ranks of each kind, in virtual time
peers/    kvflow against other libraries, where they are installed: `python3 dev.py peers`
profiling where the time of small loads goes       planning  the planner, without any transfer
verifying loads with checksums beside loads without    never_idle  loads beside a loop that is never idle
pairs     a producer and a reader in processes of their own, as most of these have them

Beside them are the tests of these and of `kvflow bench`.
"""
