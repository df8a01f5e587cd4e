"""Python objects across processes."""

from collections.abc import Callable
from typing import TypeVar

from common.errors import UserError

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

T = TypeVar("T")


def gather_lists(accelerator: Accelerator, values: list[T]) -> list[T]:
    """The lists of all processes, end to end, on each of them."""
    return gather_object(values) if accelerator.num_processes > 1 else values


def on_each_process(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """What function() gives on this process. A UserError that it raises on any is raised on all: none waits for one that has
    gone."""
    result, error = None, []
    try:
        result = function()
    except UserError as raised:
        error = [raised]
    if errors := gather_lists(accelerator, error):
        raise errors[0]
    return result


def on_main_process(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """What function() gives on the main process, on each of them. A UserError, an OSError or a SystemExit that it raises
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
