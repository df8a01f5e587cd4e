"""Python objects across processes."""

from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object

T = TypeVar("T")


def gather_lists(accelerator: Accelerator, values: list[T]) -> list[T]:
    """The lists of all processes, end to end, on each of them."""
    return gather_object(values) if accelerator.num_processes > 1 else values
