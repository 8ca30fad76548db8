"""`kvflow bench topology`: one consumer rank loads the same tokens from producers that hold them in different cuts.

cuts   who holds what, and the cases, pure        scenario  options, blocks of a turn, turns
ranks  the processes                              results   from loads to ratios, a table and verdicts, pure
"""
