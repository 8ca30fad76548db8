"""`kvflow doctor`: checks of this machine, and of the way to a peer, for what keeps kvflow from working or being fast.

run       gathers everything, in order                findings  what a check says
host      the machine: what is read, and judged       backends  which of NIXL's start, and what they move
transfer  NIXL; two processes that hand blocks over   peer      the way to a peer's side channel

cuda/     the same of machines with NVIDIA GPUs; others load nothing of it
"""
