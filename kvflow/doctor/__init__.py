"""`kvflow doctor`: checks whether kvflow works and is fast on this machine, and whether it reaches given peers.

run       runs all checks in order                      findings  the result of a check
host      facts of the machine, and their checks        backends  a hand-over by each NIXL backend
transfer  NIXL, and a hand-over between two processes   peer      the side channel of a peer
pair      a prefill and a decode engine: compatible?    stock     a vLLM engine with its own NixlConnector
version   installed versions

cuda/     checks of machines with NVIDIA GPUs; imported only there
"""
