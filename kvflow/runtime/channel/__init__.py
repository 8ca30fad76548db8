"""The side channel: it asks peers questions, answers theirs, and keeps the keys of both."""
