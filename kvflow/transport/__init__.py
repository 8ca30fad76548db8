"""Transports: implementations of `base.Transport`, which reads the memory of other engines' ranks."""
