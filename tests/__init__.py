"""The tests, and below `bench` what only those measure who work on kvflow."""
