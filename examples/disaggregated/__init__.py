"""Engines in processes of their own and a router between them: what the examples beside this folder are made of.

`worker` is where kvflow is used. The rest is what any deployment has in some form: `messages` and `channel`
stand for its RPC, `router` and `engines` for its process manager, `hand_over` for its router, `screen` for
its user.
"""
