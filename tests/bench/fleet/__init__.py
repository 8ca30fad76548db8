"""The bench `fleet`: a large fleet in virtual time, with the real runtimes and a modelled network.

channel  connections of the side channel and what answering costs, as a model
ranks    the ranks: opened, killed, drained, opened again
traffic  requests of decode ranks, and their outcomes
memory   bytes that one more peer costs a rank
scenario the options, the sizes, the judge
"""
