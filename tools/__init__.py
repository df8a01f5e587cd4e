"""Commands for the results of a run: `python -m tools.<name> --help`."""

from collections.abc import Callable
import sys

from common.errors import UserError, show_and_exit


def as_command(main: Callable[[], int | None]) -> None:
    """Call a tool's `main` and end the program: a UserError or an OSError is one line, Ctrl-C a word."""
    try:
        code = main()
        sys.stdout.flush()
    except UserError as error:
        show_and_exit(error)
    except OSError as error:  # a folder that cannot be written, a command that is not there
        show_and_exit(UserError(str(error)))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = 130
    sys.exit(code)
