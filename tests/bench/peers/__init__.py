"""The bench `peers`: the same loads through raw NIXL, kvflow and the libraries that do alike, where installed.

scenario      options, sets of pairs, rows              contenders  names, whether they run here, their processes
trials        first loads, cancels, failures, idle CPU  ranks       a reader whose loads are broken off
memory        runs of blocks, bytes that land late      results     from samples to ratios, tables, verdicts
nixl_connect  Dynamo's reads of what another offers     lmcache     LMCache's NIXL channel
rdt           Ray's direct transport                    mooncake    Mooncake's engine, reading or writing
torch_transport  torch.distributed._transport           kvflow_reader  kvflow
folders       what dev.py keeps apart                   torch_files, system_files  what dev.py gets beside packages
"""
