"""Observers that tell metrics and tracing systems what loads and leases did."""
