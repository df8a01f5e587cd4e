"""What the user is told: lines on the way, and the one exception that stands for a mistake of theirs."""

import os
import re
import sys
from typing import TextIO

from tqdm import tqdm


class UserError(Exception):
    """Bad input. The message is one line: what is wrong, where, what was expected, how to mend it."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))  # other people's exceptions are quoted, and often have many lines


# Control characters but for line breaks and tabs, and marks that turn the direction of writing: on a terminal they could
# clear it, hide a line, or set its title.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Text of data, of models or of file names, as a terminal may get it: control characters are spelled out."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def show_and_exit(error: UserError) -> None:
    """Print one line, no traceback, and leave with exit code 1."""
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f"[rank {rank}] "
    print(printable(f"{where}error: {error}"), file=sys.stderr, flush=True)
    # A rank that failed alone must not wait for the others at interpreter exit: leave at once.
    sys.stdout.flush()
    os._exit(1)


def say(line: str, file: TextIO | None = None, *, as_it_is: bool = False) -> None:
    """A line for the user, once per run and not once per process, above the progress bar if there is one.

    as_it_is: it is `printable` but for the colours that it has been given.
    """
    if os.environ.get("RANK", "0") == "0":
        file = file or sys.stdout
        tqdm.write(line if as_it_is else printable(line), file=file)
        file.flush()
