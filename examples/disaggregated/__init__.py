"""Engines in processes of their own and a router between them: what the examples beside this folder are made of.

`worker` is where kvflow is used, `keeper` says whose blocks are meanwhile: the workers of `openai_server` and of
`ray_server` have it, too. The rest is what any deployment has in some form: `messages` and `channel`
stand for its RPC, `router` and `engines` for its process manager, `hand_over` for its router, `screen` for
its user.
"""
