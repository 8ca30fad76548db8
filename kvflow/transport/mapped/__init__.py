"""Reads of a peer on this machine from its device memory, mapped into this process."""
