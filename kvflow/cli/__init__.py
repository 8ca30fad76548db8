"""The `kvflow` command line, which is the extra `kvflow[cli]`. Nothing outside this package imports typer or rich."""
