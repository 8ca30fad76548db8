"""`python3 dev.py gpu`: ten minutes of experiments on a machine with a GPU, each in processes of its own.

catalogue  which, in which order, and what is expected    command  the command line
runner     processes, limits, lines of JSON, the table    judging  what was found beside what was expected, pure
one, setting, facts  an experiment's own process, what it is told and what it tells

paths      E1 E2 E10  ways of reads, pieces               order    E3 E6  bytes of another time
speed      E4 E5 E9 E11  loads and copies                 company  E7 E8  an engine's steps, a producer's death
machine    E0 E12  doctor and tests

engine, pool, device, steps  a rank that runs kvflow      raw      a rank that runs bare NIXL

It is part of the bench, since it measures in children of the bench and comes with an installed kvflow: whoever has a
GPU can run it. Experiments are no tests; what must hold is in tests that are marked gpu, which E12 runs.
"""
