"""Loads: what kind one is, where its bytes come from, the flight that carries them, and the one place where it ends."""
