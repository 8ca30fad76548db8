"""Bytes: moving memory between agents, behind one small protocol (`base.Transport`)."""
