"""Messages to the user: progress lines, and the one exception for the user's mistakes."""

from collections.abc import Callable, Sequence
import contextlib
import os
import re
import signal
import sys
import threading
import time
from typing import Any, TextIO

from tqdm import tqdm

# tqdm's default lock is shared between processes; Python 3.14 warns about it when a run ends early. A lock
# between threads is enough.
tqdm.set_lock(threading.RLock())
# Functions called with the error that ends a run, before its process ends.
LAST_WORDS: list[Callable[[BaseException], None]] = []
SECRETS: list[str] = []  # must not appear in any message, whoever wrote it, such as a failing reward function


class UserError(Exception):
    """Bad input. The message is one line: what is wrong, where, what was expected, how to mend it. Several
    mistakes are a table below it, each with what to do."""

    def __init__(self, message: str, table: Sequence[tuple[str, str]] = ()):
        lines = [" ".join(message.split())]  # quoted exceptions of libraries often have many lines
        width = max((len(what) for what, _ in table), default=0)
        for what, to_do in table:
            lines.append(f"    {what:{width}}  {' '.join(to_do.split())}")
        super().__init__("\n".join(lines))


class OutsideError(UserError):
    """Something outside of the run is gone or fails (a server, a reward function), raised on all processes;
    the run itself is sound, and is saved before it ends."""


def quoted(value: Any, limit: int = 120, form: Any = repr) -> str:
    """A value from user code or data, shortened for a message; it may even fail to print."""
    try:
        text = form(value)
    except Exception:  # an integer of 5,000 digits, or a __repr__ that raises
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[:limit]}…"


def without_secrets(text: str) -> str:
    for secret in SECRETS:
        text = text.replace(secret, "(secret)")
    return text


# Control characters other than line breaks and tabs, and bidirectional marks: in a terminal they could clear
# it, hide a line, or set its title.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Text from data, models or file names made safe for a terminal: control characters are escaped, secrets
    removed."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), without_secrets(text))


def is_first() -> bool:
    """Whether this is the process that prints, of those started by a launcher."""
    return os.environ.get("WORLD_SIZE", "1") in ("", "1") or os.environ.get("RANK", "0") == "0"


def say(line: str, file: TextIO | None = None) -> None:
    """Print a line for the user, once per run rather than once per process, above the progress bar if there
    is one."""
    if is_first():
        file = file or sys.stdout
        # on a full disk, or without a reader, lines are lost, and the run continues
        with contextlib.suppress(OSError):
            tqdm.write(printable(line), file=file)
            file.flush()


def last_words(error: BaseException) -> None:
    """Call the functions waiting for an error that ends the run, each once."""
    while LAST_WORDS:
        with contextlib.suppress(Exception):
            LAST_WORDS.pop()(error)


def show_and_exit(error: UserError) -> None:
    """Print one line without a traceback, and exit with code 1."""
    where = "" if is_first() else f"[rank {os.environ['RANK']}] "
    if where:
        # The first process may have the same error: it prints it, and the launcher ends this one meanwhile. If this
        # one is still here afterwards, it has failed alone.
        last_words(error)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3.0)
    print(printable(f"{where}error: {error}"), file=sys.stderr, flush=True)
    last_words(error)
    sys.stdout.flush()
    os._exit(1)  # a rank that failed alone must not wait for the others
