"""What the user is told: lines on the way, and the one exception that stands for a mistake of theirs."""

import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

LONGEST = 2_000  # characters of a message
# What is called with the error that ends a run, before its process ends.
LAST_WORDS: list[Callable[[BaseException], None]] = []
# time.monotonic() of the signals that have asked this run to end: what waits for others may give up sooner.
TOLD_TO_END: list[float] = []


class UserError(Exception):
    """Bad input. The message is one line: what is wrong, where, what was expected, how to mend it."""

    def __init__(self, message: str):
        message = " ".join(message.split())  # other people's exceptions are quoted, and often have many lines
        if len(message) > LONGEST:  # what is to be done stands at the end
            message = f"{message[: LONGEST - 600]} … {message[-600:]}"
        super().__init__(message)


class OutsideError(UserError):
    """Something that a run needs is gone, raised on all processes; nothing is wrong with the run, and it is saved before it
    ends."""


def quoted(value: Any, limit: int = 120, form: Any = repr) -> str:
    """A value of somebody else's code, as a message may quote it: that it can be shown at all is not certain."""
    try:
        text = form(value)
    except Exception:  # an integer of 5,000 digits, or a __repr__ that raises
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[:limit]}…"


# Of safetensors, tokenizers and torch, which have exceptions of their own for a full disk.
_DISK = re.compile(r"os error \d|\[Errno \d+\]|No space left|enforce fail at inline_container")


def is_of_the_disk(error: Exception) -> bool:
    """Whether it is that something could not be written or read, whichever class it has."""
    return isinstance(error, OSError) or bool(_DISK.search(str(error)))


SECRETS: list[str] = []  # what no message may show, whoever wrote it: a reward function that fails at it, say


def hidden(text: str) -> str:
    for secret in SECRETS:
        text = text.replace(secret, "(secret)")
    return text


# Control characters but for line breaks and tabs, and marks that turn the direction of writing: on a terminal they could
# clear it, hide a line, or set its title.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Text of data, of models or of file names, as a terminal may get it: control characters are spelled out, secrets left
    out."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), hidden(text))


def is_first() -> bool:
    """Whether this is the process that speaks, of those that a launcher has started."""
    return os.environ.get("WORLD_SIZE", "1") in ("", "1") or os.environ.get("RANK", "0") == "0"


def show_and_exit(error: UserError) -> None:
    """Print one line, no traceback, and leave with exit code 1."""
    where = "" if is_first() else f"[rank {os.environ['RANK']}] "
    print(printable(f"{where}error: {error}"), file=sys.stderr, flush=True)
    last_words(error)
    # A rank that failed alone must not wait for the others at interpreter exit: leave at once.
    sys.stdout.flush()
    os._exit(1)


def as_command(main: Callable[[], int | None]) -> None:
    """Call a tool's `main` as a program, and end it: a UserError is one line, Ctrl-C a word, and a reader that has left
    (`| head`) no error."""
    keep_talking()
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")
    try:
        code = main()
    except UserError as error:
        show_and_exit(error)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        code = 130
    sys.exit(code)


def last_words(error: BaseException) -> None:
    """Call what waits for the end of the run by an error, each once."""
    while LAST_WORDS:
        with contextlib.suppress(Exception):
            LAST_WORDS.pop()(error)


def say(line: str, file: TextIO | None = None, *, as_it_is: bool = False) -> None:
    """A line for the user, once per run and not once per process, above the progress bar if there is one.

    as_it_is: it is `printable` but for the colours that it has been given.
    """
    if is_first():
        file = file or sys.stdout
        tqdm.write(line if as_it_is else printable(line), file=file)
        file.flush()


class _Lasting:
    """A stream whose disk may be full, and whose reader may leave: that costs lines, and not the run."""

    def __init__(self, stream: TextIO):
        self._stream, self._problem = stream, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if lost := self._problem:
            self.flush()
            if not self._problem:
                self._try(lambda: self._stream.write(f"\n[lines are missing here: {lost}]\n"))
        if not self._problem:
            self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Any) -> None:
        self._problem = ""
        try:
            act()
        except ValueError:  # closed, by a reward function
            pass
        except OSError as error:
            self._problem = error.strerror or type(error).__name__
            if error.errno in (errno.EPIPE, errno.EIO, errno.ENXIO):  # nobody is there any more
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


def keep_talking() -> None:
    """From here on nothing that is printed ends the run: a full disk, a pipe or a terminal that is gone, or a character
    that the terminal's encoding does not have."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")  # None: it was closed from the start
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream if isinstance(stream, _Lasting) else _Lasting(stream))
