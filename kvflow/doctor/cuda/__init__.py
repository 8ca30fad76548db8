"""Checks of `kvflow doctor` for machines with NVIDIA GPUs. Imported only on these machines.

nvidia        parsers of nvidia-smi's output, pure
facts         gathers all facts of the machine
cuda_checks   judges the facts, pure
"""
