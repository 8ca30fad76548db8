"""`kvflow doctor`: checks whether kvflow works and is fast on this machine, and whether it reaches given peers.

run             runs all checks in order
findings        the result of a check
host            facts of the machine, and their checks
backends        some bytes moved by each NIXL backend
nixl_transfer   NIXL, and loads between two processes
peer_channel    the side channel of a peer
engine_pair     whether a decode engine could load from a prefill engine
stock_engine    a vLLM engine with its own NixlConnector
version         installed versions

cuda/           checks of machines with NVIDIA GPUs; imported only there
"""
