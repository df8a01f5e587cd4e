"""A time limit for user code: a reward function, a chat template."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class TimeLimitReached(BaseException):
    """Not an Exception, which such code might catch."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Context that raises TimeLimitReached in code that takes longer: in Python code, in `re`, and when a C call returns.

    It is raised again each second, in case the code has caught it. No limit for 0 seconds, outside of the main thread, or on
    systems without such an alarm.
    """
    if seconds <= 0 or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeLimitReached

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
