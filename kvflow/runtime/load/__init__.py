"""Loads: which kind a load is, where its bytes come from, its flight, and the one place where it ends."""
