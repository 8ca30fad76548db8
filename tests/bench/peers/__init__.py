"""The bench `peers`: the same loads through raw NIXL, kvflow and the libraries that do alike, where installed.

scenario      options, sets of pairs                    contenders  names, whether they are installed, ranks
nixl_connect  Dynamo's reads of what another offers      mooncake    Mooncake's engine, reading or writing
results       from samples to ratios, tables, verdicts
"""
