"""`kvflow bench transfer`: the same loads through raw NIXL twice and through kvflow, interleaved.

run        the parent: pairs, turns, verification      children  two processes per contender
settings   what to measure, pure                       messages  what parent and children say to each other
samples    from samples to medians and ratios, pure    cache     the imaginary KV cache, a pattern in each word
targets    pass or fail, pure                          raw       contenders (a) and (b)
report     tables and JSON                             engine    contender (c)
"""
