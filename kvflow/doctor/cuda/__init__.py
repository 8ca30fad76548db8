"""Checks of `kvflow doctor` for machines with NVIDIA GPUs. Imported only on these machines.

nvidia  parsers of nvidia-smi's output, pure      facts  all facts of the machine, gathered
checks  what the facts mean for kvflow, pure
"""
