"""Sharing Python objects between processes, a time limit for user code, and signals in forked children."""

from collections.abc import Callable, Iterator
import contextlib
import math
import os
import signal
import threading
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from common.errors import UserError
import torch

T = TypeVar("T")


def gather_lists(accelerator: Accelerator, values: list[T]) -> list[T]:
    """The lists of all processes, concatenated, on each of them."""
    return gather_object(values) if accelerator.num_processes > 1 else values


def own_share(accelerator: Accelerator, n: int) -> range:
    """The indices of this process's share of n things. A share is a run of neighbours; all have the same length, except
    that the last ones may be shorter, or empty."""
    size = math.ceil(n / accelerator.num_processes)
    first = accelerator.process_index * size
    return range(min(first, n), min(first + size, n))


def unsharded(value: Any) -> Any:
    """A tensor that FSDP2 shards (a DTensor), whole; anything else as it is. Called on every process."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def sharded_as(here: Any, value: Any) -> Any:
    """The reverse of `unsharded`, for tensors in dicts: sharded, and on the device, as they are in `here`."""
    if isinstance(here, dict) and isinstance(value, dict):
        return {name: sharded_as(here.get(name), one) for name, one in value.items()}
    if hasattr(here, "device_mesh"):
        return torch.distributed.tensor.distribute_tensor(
            value.to(here.device), here.device_mesh, here.placements
        )
    if isinstance(here, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.to(here.device)
    return value


def anywhere(accelerator: Accelerator, here: bool) -> bool:
    """Whether `here` is true on any process. Called on each."""
    return accelerator.reduce(torch.tensor(float(here), device=accelerator.device), "sum").item() > 0


def on_each_process(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """The result of function() on this process. A UserError raised on any process is raised on all, so that
    none waits for one that is gone."""
    result, error = None, []
    try:
        result = function()
    except UserError as raised:
        error = [raised]
    if errors := gather_lists(accelerator, error):
        raise errors[0]
    return result


def on_main_process(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """The main process's result of function(), on every process. A UserError, OSError or SystemExit raised
    there is raised on all."""
    result, error = None, None
    if accelerator.is_main_process:
        try:
            result = function()
        except (UserError, OSError, SystemExit) as raised:
            error = raised
    if accelerator.num_processes > 1:
        result, error = broadcast_object_list([result, error])
    if error is not None:
        raise error
    return result


class TimeLimitReached(BaseException):
    """Not an Exception, which user code might catch."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Context that raises TimeLimitReached in user code that takes longer: in Python code, in `re`, and when
    a C call returns.

    It is raised again each second, in case the code has caught it; code that always does is never ended. No
    limit for 0 seconds, outside of the main thread, or on systems without such an alarm.
    """
    if (
        seconds <= 0
        or not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeLimitReached

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def reset_in_children(numbers: set[signal.Signals]) -> None:
    """Forked children (the pool of a reward function) end at these signals, whatever handler this process has
    for them.

    They ignore a Ctrl-C, which the terminal sends to all: this process decides what is finished first. The
    signals are blocked during a fork, because Python forgets those that reach a child before its first line:
    a pool that ends its workers would wait for one of them forever. Called once per process.
    """

    def in_child() -> None:
        for number in numbers:
            if callable(handler := signal.getsignal(number)) and handler is not signal.default_int_handler:
                signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, numbers),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers),
            after_in_child=in_child,
        )
