"""Checks of `kvflow doctor` where there are NVIDIA GPUs; nothing of it is imported anywhere else.

nvidia  what nvidia-smi prints, read: pure             facts  everything that was seen, gathered
checks  what it means for kvflow, and what to set: pure       transfer  two processes that hand blocks over on GPUs
"""
