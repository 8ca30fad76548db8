"""Engines in separate processes and a router between them: the parts of the example programs beside this folder.

Read these two modules first, which use kvflow: `prefill` offers blocks and keeps them until they have been read,
`decode` loads them. `background` has the tasks that keep blocks meanwhile, and `neighbours` loads prefixes from other
prefill workers. `openai_server` and `ray_server` use the same workers, `messages` and `failures`. The rest stands for
parts that any deployment has: `worker` for its RPC, `engines` for its process manager, `hand_over` for its router.
"""
