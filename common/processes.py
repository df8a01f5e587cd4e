"""Sharing Python objects between processes."""

from collections.abc import Callable
from typing import TypeVar

from common.errors import UserError

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

T = TypeVar("T")


def gather_lists(accelerator: Accelerator, values: list[T]) -> list[T]:
    """The lists of all processes, concatenated, on each of them."""
    return gather_object(values) if accelerator.num_processes > 1 else values


def on_each_process(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """The result of function() on this process. A UserError raised on any process is raised on all, so that none waits for
    one that is gone."""
    result, error = None, []
    try:
        result = function()
    except UserError as raised:
        error = [raised]
    if errors := gather_lists(accelerator, error):
        raise errors[0]
    return result


def on_main_process(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """The main process's result of function(), on every process. A UserError, OSError or SystemExit raised there is raised
    on all."""
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
