"""The bench `flow`: what leases that grow bring, beside whole prompts that are handed over.

link      which way the bytes go: memory, tcp, a cable of 1 Gbit/s between two networks
ranks     what producer and reader do        results   from samples to rows and verdicts, pure
scenario  the options, and whose turn it is
"""
