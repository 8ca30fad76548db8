"""The `kvflow` command line, which is the extra `kvflow[cli]`. Only this package imports typer or rich."""
