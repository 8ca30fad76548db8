"""Both halves of an engine's connector: one for the engine's scheduler, one for each of its workers."""
