"""What is decided about lives, turns, failures and leases."""
