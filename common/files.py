"""Files: hashed, flushed to disk, replaced whole, read line by line; what a finished folder holds; and which code
is loaded."""

import ast
from collections.abc import Iterator
import contextlib
import gzip
import hashlib
import json
import os
from pathlib import Path
import re
import shutil
import sys
import sysconfig
from typing import Any, BinaryIO

from common.errors import UserError

# In messages of safetensors, tokenizers and torch, which have exceptions of their own for a full disk.
DISK = re.compile(r"os error \d|\[Errno \d+\]|No space left|enforce fail at inline_container")
# Not the user's code, wherever they lie: an editable installation is in no site-packages.
LIBRARIES = {"torch", "transformers", "accelerate", "tokenizers", "safetensors", "datasets", "peft", "numpy"}


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk now."""
    windows = os.name == "nt"  # it cannot flush folders, and needs write access for files
    if windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_all(folder: Path) -> None:
    """Flush all that a folder holds to disk. Whoever may read the folder may read its files, too: those that
    safetensors writes are the owner's alone."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(folder.stat().st_mode & 0o666)
        flush(path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of another at the end: a kill leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        yield file
    flush(temporary)
    os.replace(temporary, path)


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    with replacing(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """An empty folder to write to. It gets its final name once all of it is on disk; if that fails, or the
    process is killed, there is no folder of that name."""
    temporary = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a kill
    try:
        temporary.mkdir(parents=True)
        yield temporary
        flush_all(temporary)
        os.rename(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Wraps writes that a run cannot do without. Raises UserError if the disk refuses them."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and not DISK.search(str(error)):
            raise
        raise UserError(
            f"{folder} cannot be written ({error}); once it can be, the same command resumes the run"
        ) from None


def write_manifest(folder: Path) -> None:
    """Flush all files and folders to disk, and list the files with size and hash in manifest.json."""
    flush_all(folder)
    files = {}
    manifest = folder / "manifest.json"
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != manifest:
            files[path.relative_to(folder).as_posix()] = (path.stat().st_size, file_hash(path))
    manifest.write_text(json.dumps({"files": files}, indent=1))
    flush(manifest)
    flush(folder)


def code_hash(path: Path) -> str:
    """The hash of Python code without its comments and layout. Raises SyntaxError and ValueError for other files."""
    code = ast.dump(ast.parse(path.read_text(encoding="utf-8")))
    return hashlib.sha256(code.encode()).hexdigest()


def find_damage(folder: Path) -> str | None:
    """What is damaged in a folder, or None if each file has the size and the hash of its manifest.json."""
    try:
        for name, (size, digest) in json.loads((folder / "manifest.json").read_text())["files"].items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (folder / name).stat().st_size != size or file_hash(folder / name) != digest:
                return f"{name} is damaged"
    except Exception as error:  # it may hold anything
        return f"manifest.json cannot be read ({type(error).__name__})"
    return None


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The number and text of each line, decompressed."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                # a byte order mark at the start
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                hint = "convert the file, Chinese text for example by iconv -f GB18030 -t UTF-8"
                raise UserError(f"{path}:{number}: expected UTF-8: {error.reason}; {hint}") from None


def file_of(module: Any) -> str:
    """The file of a loaded module; "" for what has none, or raises when it is asked."""
    try:
        return str(getattr(module, "__file__", None) or "")
    except Exception:
        return ""


def loaded_code(script: str) -> dict[str, str]:
    """{path: hash} of the loaded Python files that belong neither to a library nor to this package, the
    script excepted: for instance what a reward function's file imports."""
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(__file__).parent))
    hashes = {}
    for name, module in list(sys.modules.items()):
        path = file_of(module)
        is_library = path.startswith(libraries) or "-packages" in path or name.split(".")[0] in LIBRARIES
        if path.endswith(".py") and not is_library and path != script and name != "__main__":
            with contextlib.suppress(OSError):  # built in, or deleted since
                hashes[path] = file_hash(Path(path))
    return hashes
