"""`dev.py bench transfer`: the same loads through raw NIXL twice, through kvflow and through a bare thread.

scenario  options, sets of pairs, and (c)             raw      NIXL as (a) and (b) use it
ranks     a turn, and the processes of (a), (b), (d)  results  from samples to ratios, tables, verdicts
sizes     what loads move                             turns    the order of turns
"""
