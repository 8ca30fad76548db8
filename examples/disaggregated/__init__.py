"""Engines in processes of their own and a router between them: what the examples beside this folder are made of.

kvflow is used in two modules, and these are the ones to read first: `prefill` offers blocks and keeps them until they
were read, `decode` loads them. `background` has the tasks that keep blocks meanwhile, and `neighbours` loads prefixes
from other prefill workers. `openai_server` and `ray_server` have the same workers, `messages` and `failures`. The rest
is what any deployment has in some form: `worker` and `channel` stand for its RPC, `router` and `engines` for its
process manager, `hand_over` for its router, `screen` for its user.
"""
