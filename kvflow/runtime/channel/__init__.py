"""The side channel: asking, listening, keys."""
