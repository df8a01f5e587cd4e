"""Commands for the results of a run: `python -m tools.<name> --help`."""
