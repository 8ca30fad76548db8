"""Loads at the reader: requests, the steps from ticket to report, posted reads, and the one place where loads end."""
