"""Transports: they read memory of other agents, behind one small protocol (`base.Transport`)."""
