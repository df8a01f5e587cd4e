"""Other algorithms, each a copy of one of the four scripts with a few lines changed. See README.md."""
