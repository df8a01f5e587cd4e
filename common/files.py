"""Files: hashed, flushed to disk, replaced whole; what a finished folder holds; and which code is loaded."""

import contextlib
import hashlib
import json
import os
from pathlib import Path
import shutil
import sys
import sysconfig


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


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: a kill leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    os.replace(temporary, path)


def write_manifest(folder: Path) -> None:
    """Flush every file to disk and list it with size and hash in manifest.json; all are as readable as
    that."""
    files, manifest = {}, folder / "manifest.json"
    manifest.touch()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != manifest):
        shutil.copymode(manifest, path)  # safetensors' files are the owner's alone
        flush(path)
        files[path.relative_to(folder).as_posix()] = (path.stat().st_size, file_hash(path))
    manifest.write_text(json.dumps({"files": files}, indent=1))
    flush(manifest)
    for path in [path for path in folder.rglob("*") if path.is_dir()] + [folder]:
        flush(path)


def find_damage(folder: Path) -> str | None:
    """What is damaged in a folder, or None if each file has the size and the hash that its manifest.json
    says."""
    try:
        for name, (size, digest) in json.loads((folder / "manifest.json").read_text())["files"].items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (folder / name).stat().st_size != size or file_hash(folder / name) != digest:
                return f"{name} is damaged"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json cannot be read ({type(error).__name__})"
    return None


def loaded_code(script: str) -> dict[str, str]:
    """{path: hash} of the loaded Python files that belong neither to a library nor to this package, the
    script excepted: for instance what a reward function's file imports."""
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(__file__).parent))
    found = {}
    for name, module in list(sys.modules.items()):
        path = str(getattr(module, "__file__", None) or "")
        is_library = path.startswith(libraries) or "-packages" in path
        if path.endswith(".py") and not is_library and path != script and name != "__main__":
            with contextlib.suppress(OSError):  # built in, or deleted since
                found[path] = file_hash(Path(path))
    return found
