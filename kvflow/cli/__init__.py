"""The `kvflow` command line. It is the extra `kvflow[cli]`: nothing outside this package imports typer or rich."""
