"""`kvflow bench fairness`: what one-block loads wait for while huge loads run beside them.

run       the parent: rounds, and the bench as one call       reader  the process that loads
settings  options, block ids of a round, pure                 report  tables and JSON
results   from samples to ratios and verdicts, pure
"""
