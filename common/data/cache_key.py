"""The name of tokenised data in the cache: a hash of everything that it depends on.

That is: the rows, the tokenizer, the versions of the code and libraries that read and tokenise, and the script's `encode`,
which includes its source, the functions and classes of its module that it uses, the constants they read (the whole module if
they are not simple), the user's modules that any of these come from, and the values of the arguments they read.
"""

import ast
import dataclasses
import hashlib
import importlib.util
import inspect
import json
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from common.args import CommonArgs, may_change
from common.data.sources import Source, identity
from common.data.types import Tokenizer
from common.errors import UserError


def cache_key(source: Source, encode: Callable[..., Any], tokenizer: Tokenizer, args: CommonArgs, column: str | None) -> str:
    """A hash of everything that the tokens of a source depend on. column: that of the curriculum."""
    if not inspect.isfunction(encode):
        raise UserError(f"encode is {encode!r}; expected a function of (row, tokenizer, args)")
    code = [source_code(encode), constants(encode), args_read(encode, args)]
    return digest([identity(source), column, code, fingerprint(tokenizer), *versions()])


def digest(parts: list[Any]) -> str:
    """A hash of JSON-serialisable parts, as 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def versions() -> list[str]:
    """Versions of the code that reads and tokenises: this package's and the libraries'."""
    ours = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return [*ours, version("transformers"), version("tokenizers")]


def fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of a tokenizer's behaviour: its tables, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        tables = json.dumps(sorted(tokenizer.get_vocab().items()))
    else:
        backend.no_truncation()  # left by an earlier call, not a property of the tokenizer
        backend.no_padding()
        tables = backend.to_str()
    state = [type(tokenizer).__name__, tables, tokenizer.special_tokens_map, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(state, default=str).encode()).hexdigest()


# --- the code of a function -----------------------------------------------------------------------------------------


def source_code(function: FunctionType) -> list[str]:
    """The source of a function; of the functions and classes of its module that it uses, directly or not; and of whole user
    modules (not libraries) that any of these come from."""
    functions, classes, modules = _used(function)
    return [inspect.getsource(part) for part in [*functions, *classes, *modules]]


def constants(function: FunctionType) -> dict[str, Any]:
    """The simple constants (numbers, strings, patterns, lists and dicts of them) that this code reads as globals."""
    found: dict[str, Any] = {}
    for f in _used(function)[0]:
        for number, default in enumerate(f.__defaults__ or ()):
            found[f"{f.__qualname__}({number})"] = _plain(default)
        cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
        for code in _codes(f):
            for name in code.co_names:
                if name in f.__globals__ and (value := _plain(f.__globals__[name])) is not None:
                    found[name] = value
        for name, cell in cells.items():
            if (value := _plain(cell.cell_contents)) is not None:
                found[f"{f.__qualname__}.{name}"] = value
    return found


def _used(function: FunctionType) -> tuple[list[FunctionType], list[type], list[ModuleType]]:
    """Everything that a function's result may depend on: functions and classes of its module, and other user modules."""
    functions, classes, modules = [function], [], []
    for f in functions:  # grows during the loop
        values = [f.__globals__.get(name) for code in _codes(f) for name in code.co_names]
        values += [cell.cell_contents for cell in f.__closure__ or ()]
        for value in values:
            value = inspect.unwrap(value) if callable(value) else value  # lru_cache, functools.wraps
            if inspect.ismodule(value):
                _add_module(value, modules)
            elif (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ != f.__module__:
                _add_module(sys.modules.get(value.__module__), modules)
            elif inspect.isfunction(value):
                functions += [value] if value not in functions else []
            elif inspect.isclass(value):
                classes += [value] if value not in classes else []
                functions += [m for m in vars(value).values() if inspect.isfunction(m) and m not in functions]
            elif value is not None and _plain(value) is None:  # an array, an instance, a dict of functions, ...
                _add_module(sys.modules.get(f.__module__), modules)
                _add_module(sys.modules.get(type(value).__module__), modules)
    return functions, classes, modules


def _add_module(module: ModuleType | None, modules: list[ModuleType]) -> None:
    """Add a user module, and those that it imports."""
    if module is None or module in modules or not _is_own(module):
        return
    modules.append(module)
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = "." * node.level + (node.module or "")
            absolute = importlib.util.resolve_name(parent, module.__package__) if node.level else parent
            names = [absolute, *(f"{absolute}.{name.name}" for name in node.names)]
        else:
            continue
        for name in names:
            _add_module(sys.modules.get(name), modules)


def _is_own(module: ModuleType) -> bool:
    """Whether a module belongs neither to a library nor to this package, whose code and versions are in the key anyway."""
    file = getattr(module, "__file__", None) or ""
    theirs = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))
    return file.endswith(".py") and module.__name__.split(".")[0] != "common" and not any(part in file for part in theirs)


def _codes(function: FunctionType) -> list[CodeType]:
    """The code objects of a function, and of the functions and comprehensions inside it."""
    codes = [function.__code__]
    for code in codes:  # grows during the loop
        codes += [const for const in code.co_consts if inspect.iscode(const)]
    return codes


def _plain(value: Any) -> str | None:
    """A simple constant as text that is the same in every process; None for anything else."""
    if isinstance(value, str | int | float | complex | bytes | None):
        return repr(value)
    if isinstance(value, re.Pattern):
        return f"{value.pattern!r} {value.flags}"
    if isinstance(value, dict):
        parts = [part for pair in value.items() for part in map(_plain, pair)]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = [_plain(part) for part in value]
    else:
        return None
    if None in parts:
        return None
    return f"{type(value).__name__}({', '.join(sorted(parts) if isinstance(value, set | frozenset) else parts)})"


# --- the arguments that it reads ------------------------------------------------------------------------------------


def args_read(function: FunctionType, args: CommonArgs) -> dict[str, Any]:
    """The values of the arguments that encode(row, tokenizer, args) reads: `args.NAME`, directly or in functions it calls.

    If args as a whole are passed on (to a function of another module, into a variable): all of them, except those marked as
    having no influence on the data (may_change).
    """
    names = _names_read(function, 2)
    if names is not None and all(hasattr(args, name) and not callable(getattr(args, name)) for name in names):
        return {name: getattr(args, name) for name in sorted(names)}
    ignored = may_change(type(args)) if dataclasses.is_dataclass(args) else {}
    return {name: value for name, value in sorted(vars(args).items()) if not ignored.get(name)}


def _names_read(function: FunctionType, place: int) -> set[str] | None:
    """The attributes that a function reads of its parameter number `place`; None if it is also used in other ways."""
    names: set[str] = set()
    waiting = [(function, place)]
    for f, at in waiting:  # grows during the loop
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(f))).body[0]
        except (OSError, SyntaxError):  # a lambda inside an expression
            return None
        if not isinstance(tree, ast.FunctionDef):
            return None
        parameters = [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]
        if at >= len(parameters):
            return None
        word = parameters[at].arg
        understood = set()  # uses of the parameter in the code that are understood
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is(node.value, word) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
                understood.add(node.value)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called = f.__globals__.get(node.func.id)
                if inspect.isfunction(called) and called.__module__ == f.__module__:
                    for value, target in _parameters(node, called):
                        if _is(value, word) and target is not None:
                            understood.add(value)
                            if (called, target) not in waiting:
                                waiting.append((called, target))
        if any(_is(node, word) and node not in understood for node in ast.walk(tree)):
            return None
    return names


def _is(node: ast.AST, word: str) -> bool:
    return isinstance(node, ast.Name) and node.id == word


def _parameters(call: ast.Call, called: FunctionType) -> Iterator[tuple[ast.AST, int | None]]:
    """Each value of a call with the number of the parameter that receives it; None if unknown."""
    code = called.__code__
    names = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    starred = any(isinstance(value, ast.Starred) for value in call.args)
    for place, value in enumerate(call.args):
        yield value, place if not starred and place < code.co_argcount else None
    for keyword in call.keywords:
        yield keyword.value, names.index(keyword.arg) if keyword.arg in names else None
