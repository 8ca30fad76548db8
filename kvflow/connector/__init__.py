"""The two halves of an engine's connector: the scheduler's side and the worker's."""
