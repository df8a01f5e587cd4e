"""Folders of the cache: each is built once, under another name, and then renamed.

What a killed run leaves behind is never taken for a complete folder.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError, say

if TYPE_CHECKING:
    from accelerate import Accelerator


def build_once(accelerator: "Accelerator", folder: Path, build: Callable[[Path], None]) -> None:
    """Have build(folder) write a folder that is not there yet. Called on every process."""
    # One process builds it; on another node whose disk is not shared, one there, too.
    first = accelerator.is_main_process
    for mine in (first, accelerator.is_local_main_process and not first):
        if mine and not is_complete(folder):
            with new_folder(folder) as temporary:
                build(temporary)
        accelerator.wait_for_everyone()


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write in, which gets its name, and the list of its files, when all of it is on the disk.

    Raises UserError where that cannot be done.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}-{time.time_ns()}.tmp")  # in a container all runs are pid 1
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for old in folder.parent.glob(".*.tmp"):
            with contextlib.suppress(FileNotFoundError):  # another run has removed it, or finished it
                if time.time() - max(path.stat().st_mtime for path in (old, *old.iterdir())) > 24 * 3600:
                    shutil.rmtree(old, ignore_errors=True)  # of a killed run
        temporary.mkdir()
        yield temporary
        found = {file.name: [file.stat().st_size, _hash(file)] for file in sorted(temporary.iterdir())}
        (temporary / "files.json").write_text(json.dumps(found))
        for file in temporary.iterdir():
            flush(file)
        if not is_complete(folder):  # else another run has built it in the meantime
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(temporary, folder)
    except OSError as error:
        raise UserError(f"--dataset_cache_dir {folder.parent}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_complete(folder: Path) -> bool:
    """Whether a folder is there with all its files, each with what was written into it. One that is damaged is said."""
    if not folder.exists():
        return False
    try:
        damaged = [
            name
            for name, (size, digest) in json.loads((folder / "files.json").read_text()).items()
            if (folder / name).stat().st_size != size or _hash(folder / name) != digest
        ]
    except (OSError, ValueError, TypeError, AttributeError):
        damaged = ["files.json"]
    if damaged:
        say(f"{folder}: {damaged[0]} is damaged: it is made anew")
    return not damaged


def content(folder: Path, *names: str) -> str:
    """A hash of what these files of a complete folder hold."""
    files = json.loads((folder / "files.json").read_text())
    return hashlib.sha256("".join(files[name][1] for name in names if name in files).encode()).hexdigest()[:16]


def _hash(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Have the system write a file, or the entries of a folder, to the disk now."""
    windows = os.name == "nt"  # which has no such thing for folders, and wants the right to write
    if windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
