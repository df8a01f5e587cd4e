"""Running user code in this process: it is loaded from a file, its global settings are reverted, and it can neither end the
process nor fork a second one that continues."""

import asyncio
import contextlib
import importlib.util
import inspect
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.errors import UserError, quoted
from common.time_limit import TimeLimitReached, time_limit

import torch

DEVICES = ("cpu", "cuda", "mps", "xpu")


def from_file(spec: str, timeout: float = 0.0, kind: str = "function") -> Any:
    """The function or class (kind) named by "path/to/file.py:name". timeout: seconds that the import may take; 0: no limit.
    Raises UserError if it cannot be loaded."""
    path, _, name = spec.rpartition(":") if ".py:" in spec else (spec, "", "")
    if not os.path.isfile(path):
        raise UserError(f"there is no file {path}")
    module_spec = importlib.util.spec_from_file_location(f"plainloop_file_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look up a class's module here
    try:
        with undisturbed(), time_limit(timeout):
            module_spec.loader.exec_module(module)
    except TimeLimitReached:
        raise UserError(f"importing it took more than {timeout:g} s (--reward_timeout)") from None
    except BaseException as error:  # the import may raise anything
        raise UserError(f"importing it failed: {raised(error)} ({line_of(error)})") from None
    if not name:
        is_kind = inspect.isclass if kind == "class" else inspect.isfunction
        own = {n: value for n, value in vars(module).items() if getattr(value, "__module__", None) == module_spec.name}
        found = [f"{path}:{n}" for n, value in own.items() if is_kind(value) and not n.startswith("_")]
        raise UserError(f"name the {kind}: {' or '.join(found) or 'it has none'}")
    if not callable(getattr(module, name, None)):
        raise UserError(f"{path} has no {kind} {name}")
    return getattr(module, name)


def call(function: Callable[..., Any], timeout: float, /, **arguments: Any) -> Any:
    """function(**arguments), awaited if necessary, under `undisturbed`. Raises whatever it raises, and TimeLimitReached
    after timeout seconds (0: no limit)."""
    with undisturbed(), time_limit(timeout):
        value = function(**arguments)
        return asyncio.run(value) if inspect.isawaitable(value) else value


def must(what: str, function: Callable[..., Any], timeout: float, /, **arguments: Any) -> Any:
    """Like `call`, but a failure ends the run: a UserError that says what failed, how, and in which line."""
    try:
        return call(function, timeout, **arguments)
    except TimeLimitReached:
        raise UserError(f"{what} took more than {timeout:g} s") from None
    except BaseException as error:  # user code may raise anything, and call sys.exit
        raise UserError(f"{what} raised {raised(error)} ({line_of(error, function)})") from None


def raised(error: BaseException) -> str:
    return f"{type(error).__name__}: {quoted(error, 600, str)}"


def line_of(error: BaseException | None, function: Callable[..., Any] | None = None) -> str:
    """The line that raised it: the last one outside of libraries; else the function's location."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__) if error else []
    libraries = ("site-packages", sysconfig.get_path("stdlib"), str(Path(__file__).parent), "<frozen ")
    own = [frame for frame in frames if not any(place in frame.filename for place in libraries)]
    if own:
        return f"{own[-1].filename}:{own[-1].lineno}"
    code = getattr(function.__init__ if inspect.isclass(function) else function, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "in a library"


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Context around a call: torch's defaults and modes, the working directory, signals and the recursion limit are
    restored.

    os._exit raises a SystemExit that says so. A forked child that returns exits here.
    """
    pid, leave = os.getpid(), os._exit

    def refuse(code: int = 0) -> None:
        ours = sys._getframe(1).f_globals.get("__name__", "").startswith("common.")  # a second Ctrl-C meanwhile
        if ours or os.getpid() != pid:  # the exit of a forked child
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
    """Settings as (get, set) pairs."""
    found: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (sys.getrecursionlimit, sys.setrecursionlimit),
        (_folder, lambda folder: folder and os.chdir(folder)),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_default_device, lambda _: torch.set_default_device(None)),  # this project never sets one
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
            if signal.getsignal(number) is not None:  # a handler of C code cannot be set again
                found.append((lambda n=number: signal.getsignal(n), lambda handler, n=number: signal.signal(n, handler)))
    return found


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # deleted
        return None


def _nesting() -> int:
    """The number of active autocast contexts."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
