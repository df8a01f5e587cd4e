"""Somebody else's code in this process: what it sets is set back, and it neither ends the process nor makes a second one."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

DEVICES = ("cpu", "cuda", "mps", "xpu")


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Around a call: torch's defaults and modes, the folder, signals and Python's recursion limit are as before after it.

    os._exit becomes a SystemExit, which says that it was called. A forked child that comes back ends here.
    """
    pid, leave = os.getpid(), os._exit

    def refuse(code: int = 0) -> None:
        ours = sys._getframe(1).f_globals.get("__name__", "").startswith("common.")  # a second Ctrl-C meanwhile
        if ours or os.getpid() != pid:  # how a forked child ends
            leave(code)
        raise SystemExit(f"os._exit({code})")

    settings = _settings()
    before = [get() for get, _ in settings]
    nesting = _nesting()
    os._exit = refuse
    try:
        yield
    finally:
        if os.getpid() != pid:
            leave(1 if sys.exc_info()[1] else 0)
        os._exit = leave
        for _ in range(_nesting() - nesting):
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        for (get, put), value in zip(settings, before, strict=True):
            if get() != value:
                put(value)


def _settings() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """What can be read and set: (get, set)."""
    found: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (sys.getrecursionlimit, sys.setrecursionlimit),
        (_folder, lambda folder: folder and os.chdir(folder)),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_default_device, lambda _: torch.set_default_device(None)),  # nobody here has set one
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    ]
    for device in DEVICES:
        found.append((lambda d=device: torch.is_autocast_enabled(d), lambda on, d=device: torch.set_autocast_enabled(d, on)))
        found.append((lambda d=device: torch.get_autocast_dtype(d), lambda to, d=device: torch.set_autocast_dtype(d, to)))
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
        for number in numbers:
            if signal.getsignal(number) is not None:  # of C code: it cannot be set again
                found.append((lambda n=number: signal.getsignal(n), lambda handler, n=number: signal.signal(n, handler)))
    return found


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # deleted
        return None


def _nesting() -> int:
    """How many autocasts are entered."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
