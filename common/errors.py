"""What the user is told: lines on the way, and the one exception that stands for a mistake of theirs."""

import os
import sys
from typing import TextIO


class UserError(Exception):
    """Bad input. The message is one line: what is wrong, where, what was expected, how to mend it."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))  # other people's exceptions are quoted, and often have many lines


def show_and_exit(error: UserError) -> None:
    """Print one line, no traceback, and leave with exit code 1."""
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f"[rank {rank}] "
    print(f"{where}error: {error}", file=sys.stderr, flush=True)
    # A rank that failed alone must not wait for the others at interpreter exit: leave at once.
    sys.stdout.flush()
    os._exit(1)


def say(line: str, file: TextIO | None = None) -> None:
    """A line for the user, once per run and not once per process."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=file or sys.stdout, flush=True)
