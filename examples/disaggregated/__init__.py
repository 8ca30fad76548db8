"""Two engines in two processes and a router between them: what `disaggregated_chat.py` is made of.

`worker` is where kvflow is used. The rest is what any deployment has in some form: `messages` and `channel`
stand for its RPC, `router` for its process manager, `screen` for its user.
"""
