"""A process that dies at the n-th call that touches the disk, without dying."""

import builtins
from collections.abc import Callable, Iterator
import contextlib
import os
from pathlib import Path
import shutil
from typing import Any

import pytest
import torch

TOUCHING = [(os, name) for name in ("rename", "replace", "fsync", "mkdir", "open", "unlink", "rmdir")] + [
    (torch, "save")
]
TOUCHING += [(shutil, "rmtree"), (shutil, "copy"), (Path, "write_text"), (Path, "rename"), (builtins, "open")]


class Kill(BaseException):
    pass


@contextlib.contextmanager
def killed_at(monkeypatch: pytest.MonkeyPatch, at: int) -> Iterator[Callable[[], bool]]:
    """The call number `at` raises Kill, before it has done its work or after it, in turn. Gives what says
    whether it has come to that."""
    left = [at]

    def dying(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1 and at % 2:
                raise Kill
            result = function(*args, **kwargs)
            if left[0] == -1:
                raise Kill
            return result

        return call

    with monkeypatch.context() as patch:
        for module, name in TOUCHING:
            patch.setattr(module, name, dying(getattr(module, name)))
        yield lambda: left[0] < 0
