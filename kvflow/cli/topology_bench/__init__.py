"""`kvflow bench topology`: one consumer rank loads the same tokens from producers that hold them in different cuts.

run       the parent: rounds, turns, verification      producer, consumer  the processes
cuts      who holds what, and the cases, pure          pattern  a rank's cache; every word says what it is
settings  options, block ids of a turn, pure           prompts  planning of a long prompt, memory of a peer
results   from samples to ratios and verdicts, pure    report   tables and JSON
"""
