"""The cache of tokenised data: each source is tokenised once, in parallel, into memory-mapped files that
later runs use.

A source's folder holds the arrays of `Encoded` for all its rows, each in a file, and facts about them. It is
used again for the same rows, tokenizer, libraries and code (`key_of`), if the arguments that `encode` read
have the values that they had.
"""

import ast
from collections.abc import Callable
import contextlib
from functools import partial
import glob
import hashlib
from importlib.metadata import version
import inspect
import json
import os
from pathlib import Path
import pickle
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from common.args import CommonArgs
from common.data.encode import Account, Encode, Job, Layout, agree, encode_all
from common.data.examples import Examples, TokenFile
from common.data.sources import Source, identity, read_rows
from common.data.tokens import engine_of
from common.data.types import Tokenizer
from common.errors import UserError, printable
from common.files import file_hash, file_of, loaded_code, new_folder
import numpy as np
from tqdm import tqdm

if TYPE_CHECKING:
    from accelerate import Accelerator


def tokenize(accelerator: "Accelerator", sources: list[Source], job: Job) -> Examples:
    """All rows of the sources as examples, from the cache where available. Called on every process. Raises
    UserError for files that are no longer as they were written."""
    files = []
    for source in sources:
        name = f"{source.label}-{digest([job.key, job.column, identity(source)])}"
        folder = build_once(
            accelerator,
            Path(job.args.dataset_cache_dir, name),
            partial(_build, source, job),
            partial(_fits, job.args),
        )
        files.append(_open(folder))
        facts = files[-1].facts
        if accelerator.is_main_process and _digest(folder, len(facts["arrays"])) != facts["digest"]:
            raise UserError(f"{folder}: its files have changed: delete it, and its rows are tokenised again")
        Account(files[-1].facts).say(f"rows of {source.label}")
    return Examples(files, sources)


def _build(source: Source, job: Job, folder: Path) -> None:
    """Tokenise a source into a folder. Raises UserError if the rows cannot be used."""
    facts = {"tokens": 0, "trained_tokens": 0}
    account = Account()
    read = set()
    code = {}
    arrays = {}  # {number: (dtype, size)}
    layout = None
    rows = enumerate(row for row, _ in read_rows(source))
    with tqdm(desc=printable(f"tokenising {source.label}"), unit=" rows", mininterval=1, delay=2) as bar:
        for count, encoded in encode_all(rows, job, job.args.dataset_num_proc):
            account.merge(encoded.account)
            read |= encoded.read
            code |= encoded.code
            bar.update(count)
            if encoded.layout is None:
                continue
            layout = agree(layout, encoded.layout)
            columns = [encoded.lengths, encoded.counts, encoded.sizes, encoded.rows, encoded.difficulty]
            columns += encoded.fields.values()
            # Files are numbered, since fields may have any name.
            for number, array in enumerate(columns):
                with open(folder / f"{number}.bin", "ab") as file:
                    array.tofile(file)
                    arrays[number] = (str(array.dtype), file.tell() // array.itemsize)
            facts["tokens"] += len(encoded.fields["input_ids"])
            facts["trained_tokens"] += int(encoded.fields["loss_mask"].sum(dtype=np.int64))
    if layout is None:
        account.say(f"rows of {source.path}")  # raises
    facts |= account.facts() | {"layout": layout, "arrays": list(arrays.values())}
    facts["args"] = {name: digest([getattr(job.args, name)]) for name in sorted(read)}
    facts["code"] = code | loaded_code(inspect.getsourcefile(job.encode))
    facts["digest"] = _digest(folder, len(arrays))
    (folder / "facts.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")


def _digest(folder: Path, num_arrays: int) -> str:
    """A hash of the arrays in a folder."""
    return digest([file_hash(folder / f"{number}.bin") for number in range(num_arrays)])


def _open(folder: Path) -> TokenFile:
    """Open a folder written by _build, with its tokens memory-mapped."""
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    arrays = []
    for number, (dtype, size) in enumerate(facts["arrays"]):
        # As an array: slicing a memmap takes three times as long.
        arrays.append(np.asarray(np.memmap(folder / f"{number}.bin", dtype, "r", shape=(size,))))
    lengths, counts, sizes, rows, difficulty, *values = arrays
    layout = Layout(*facts["layout"])
    ends = np.cumsum(lengths)
    fields = dict(zip(layout.fields, values, strict=True))
    return TokenFile(
        layout=layout,
        starts=ends - lengths,
        ends=ends,
        counts=counts,
        sizes=sizes,
        rows=rows,
        difficulty=difficulty,
        fields=fields,
        facts=facts,
    )


# --- folders ------------------------------------------------------------------------------------------------


def build_once(
    accelerator: "Accelerator",
    name: Path,
    build: Callable[[Path], None],
    fits: Callable[[Path], bool] = Path.is_dir,
) -> Path:
    """A complete folder of this name (and a suffix) for which fits(folder) is true; if there is none,
    build(folder) writes it. Called on every process."""
    # One process builds it, and one on every other node whose disk is not shared.
    for mine in (accelerator.is_main_process, accelerator.is_local_main_process):
        if mine and _find(name, fits) is None:
            _write(name, build)
        accelerator.wait_for_everyone()
    return _find(name, fits)


def _find(name: Path, fits: Callable[[Path], bool]) -> Path | None:
    for folder in sorted(name.parent.glob(f"{glob.escape(name.name)}-*")):
        try:
            if fits(folder):
                return folder
        except Exception:
            continue  # a damaged folder, or a stray file
    return None


def _write(name: Path, build: Callable[[Path], None]) -> None:
    """Build a folder whole or not at all. Two runs may do so at the same time: then there are two."""
    suffix = f"{os.getpid()}{time.time_ns():x}"  # in a container every run has pid 1
    try:
        with new_folder(name.with_name(f"{name.name}-{suffix}")) as folder:
            build(folder)
    except OSError as error:
        raise UserError(f"--dataset_cache_dir {name.parent}: cannot be written: {error}") from None


# --- what tokens depend on ----------------------------------------------------------------------------------


def make_job(accelerator: "Accelerator", encode: Encode, tokenizer: Tokenizer, args: CommonArgs) -> Job:
    """Called on every process, which all get the main process's key: a script's constants may depend on the
    process."""
    if not inspect.isfunction(encode) or "<locals>" in encode.__qualname__:
        raise UserError(
            f"encode is {encode!r}; expected a function of (row, tokenizer, args) at the script's top level"
        )
    from common.processes import on_main_process  # slow to import, and not needed in workers

    return Job(encode, tokenizer, args, on_main_process(accelerator, lambda: key_of(encode, tokenizer)))


def key_of(encode: Encode, tokenizer: Tokenizer) -> str:
    """A hash of all that tokens depend on: the tokenizer, the libraries, this folder's code, the script without
    its `main`, all other loaded code of the user, and the constants at the top of both, which may come from a
    file or the environment."""
    script = inspect.getsourcefile(encode)
    code = loaded_code(script)
    constants = {encode.__module__: _constants(encode.__globals__)}
    for module in list(sys.modules.values()):
        if file_of(module) in code:
            constants[module.__name__] = _constants(vars(module))
    parts = [_code(Path(script)), sorted(code.values()), constants, fingerprint(tokenizer), *versions()]
    return digest(parts)


def _constants(names: dict[str, Any]) -> dict[str, Any]:
    """The constants at the top of a module, as JSON: numbers, texts, arrays and tensors, also within lists."""
    constants = {}
    for name, value in names.items():
        with contextlib.suppress(Exception):  # an object may raise even when its type is asked
            content = _content(value)
            if content is not None and not name.startswith("__"):
                constants[name] = content
    return constants


def _content(value: Any, depth: int = 12) -> Any:
    """A value as JSON, the same in every process; None if it is no constant, but for instance a function."""
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if isinstance(value, list | tuple) and depth:
        return [_content(part, depth - 1) for part in value]
    if isinstance(value, str | bytes | int | float | complex | np.generic | Path | re.Pattern):
        return repr(value)
    if hasattr(type(value), "detach") and hasattr(type(value), "shape"):  # a tensor
        value = value.detach().cpu().double().numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        content = pickle.dumps(np.ascontiguousarray(value))
        return [str(value.dtype), value.shape, hashlib.sha256(content).hexdigest()]
    return None


def _fits(args: CommonArgs, folder: Path) -> bool:
    """Whether `encode` would read and import the same as when the folder was written."""
    facts = _open(folder).facts  # opened, so that a folder whose files are missing or short does not fit
    for name, old in facts["args"].items():
        if digest([getattr(args, name)]) != old:
            return False
    return all(file_hash(Path(path)) == old for path, old in facts["code"].items())


def digest(parts: list[Any]) -> str:
    """A hash of JSON-serialisable parts, as 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def versions() -> list[str]:
    """Of the code that reads and tokenises: this folder's and the libraries'."""
    here = Path(__file__).parent
    ours = [file_hash(path) for path in sorted(here.glob("*.py"))]
    return [*ours, version("transformers"), version("tokenizers")]


def fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of a tokenizer's behaviour: its tables, special tokens and chat template."""
    tables = engine_of(tokenizer).to_str()
    return digest([type(tokenizer).__name__, tables, tokenizer.special_tokens_map, tokenizer.chat_template])


def _code(script: Path) -> str:
    """A script without the parts that cannot change tokens: comments, docstrings, `main`, imports for `main`
    alone, and the fields of its arguments. (Their values count: see `_fits`.)"""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if getattr(node, "name", "") != "main"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [part for part in node.body if not _is_idle(part)] or [ast.Pass()]
    used = {"*"} | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    lines = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [alias for alias in node.names if (alias.asname or alias.name).split(".")[0] in used]
            if not node.names:
                continue
        lines.append(ast.unparse(node))
    return "\n".join(lines)


def _is_idle(node: ast.stmt) -> bool:
    """A docstring, or a field of a script's arguments."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
        return ast.unparse(node.value.func) == "arg"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
