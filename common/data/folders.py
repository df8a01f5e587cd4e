"""Cache folders: each is built once, under a temporary name, and then renamed.

Leftovers of a killed run are never taken for a complete folder.
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
from common.files import file_hash, flush

if TYPE_CHECKING:
    from accelerate import Accelerator


def build_once(accelerator: "Accelerator", folder: Path, build: Callable[[Path], None]) -> None:
    """Have build(folder) write a folder unless it exists. Called on every process."""
    # One process builds it, and one on every other node whose disk is not shared.
    first = accelerator.is_main_process
    for mine in (first, accelerator.is_local_main_process and not first):
        if mine and not is_complete(folder):
            with new_folder(folder) as temporary:
                build(temporary)
        accelerator.wait_for_everyone()


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Context with a temporary folder, which gets its final name and the list of its files once it is all on disk.

    Raises UserError if that fails.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}-{time.time_ns()}.tmp")  # in a container every run has pid 1
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for old in folder.parent.glob(".*.tmp"):
            with contextlib.suppress(FileNotFoundError):  # another run has removed or finished it
                if time.time() - max(path.stat().st_mtime for path in (old, *old.iterdir())) > 24 * 3600:
                    shutil.rmtree(old, ignore_errors=True)  # left by a killed run
        temporary.mkdir()
        yield temporary
        found = {file.name: [file.stat().st_size, file_hash(file)] for file in sorted(temporary.iterdir())}
        (temporary / "files.json").write_text(json.dumps(found))
        for file in temporary.iterdir():
            flush(file)
        if not is_complete(folder):  # otherwise another run has built it meanwhile
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(temporary, folder)
    except OSError as error:
        raise UserError(f"--dataset_cache_dir {folder.parent}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_complete(folder: Path) -> bool:
    """Whether a folder exists with all its files as they were written. Reports a damaged one."""
    if not folder.exists():
        return False
    try:
        damaged = [
            name
            for name, (size, digest) in json.loads((folder / "files.json").read_text()).items()
            if (folder / name).stat().st_size != size or file_hash(folder / name) != digest
        ]
    except (OSError, ValueError, TypeError, AttributeError):
        damaged = ["files.json"]
    if damaged:
        say(f"{folder}: {damaged[0]} is damaged: it is made anew")
    return not damaged


def content(folder: Path, *names: str) -> str:
    """A hash of the contents of these files of a complete folder."""
    files = json.loads((folder / "files.json").read_text())
    return hashlib.sha256("".join(files[name][1] for name in names if name in files).encode()).hexdigest()[:16]
