"""What is done with the results of a run: each a command, `python -m tools.<name> --help`."""
