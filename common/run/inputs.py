"""What a run is made of besides its arguments: the script, the files that arguments name, the training data.

It is written to `inputs.json`, in the output folder and in each checkpoint, with a copy of the script beside it. A run that
goes on is compared with it: where something else has been put in its place, the two halves would be of different runs.
"""

import ast
import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.args import CommonArgs
from common.errors import UserError, say

FILE = "inputs.json"


def inputs_of(args: CommonArgs, script: str) -> dict[str, Any]:
    """What is known at the start: {"script": its name, "files": {path: hash} of the files with code that arguments name}."""
    files = {}
    for value in vars(args).values():
        for word in value if isinstance(value, list) else [value]:
            path = Path(re.sub(r"\.py:\w+$", ".py", str(word)))  # file.py:function
            if path.suffix in (".py", ".jinja") and path.is_file():
                files[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"script": Path(script).name, "files": files}


def compare_script(args: CommonArgs, script: str, earlier: Path | None) -> None:
    """Refuse to go on where the script, or a file that an argument names, is not what it was.

    earlier: the checkpoint, or the folder of a complete run; None: there is none. Raises UserError, or says it with
    --accept_changes.
    """
    before = _read(earlier)
    if not before:
        return
    changes = []
    copy, name = earlier / str(before.get("script")), Path(script).name
    if copy.is_file() and _code(copy) != _code(Path(script)):
        changes.append(f"{name} has been edited" if copy.name == name else f"it is a run of {copy.name}, and this is {name}")
    files = before.get("files", {})
    for path, digest in inputs_of(args, script)["files"].items():
        if files.get(path, digest) != digest:
            changes.append(f"{path} has been edited")
    _refuse(args, earlier, changes)


def compare_data(args: CommonArgs, data: Mapping[str, str], checkpoint: Path | None) -> None:
    """The same for the training data. data: a hash of what each source gives, by its label."""
    before = _read(checkpoint).get("data", {})
    changed = [label for label, digest in data.items() if before.get(label, digest) != digest]
    _refuse(args, checkpoint, [f"the rows of {label} are not those that it had" for label in changed])


def keep(folder: Path, script: str, inputs: Mapping[str, Any]) -> None:
    """Write inputs.json and a copy of the script."""
    if not (folder / Path(script).name).exists() or not (folder / Path(script).name).samefile(script):
        shutil.copy(script, folder)
    (folder / FILE).write_text(json.dumps(inputs, indent=1, ensure_ascii=False), encoding="utf-8")


def copy_inputs(output_dir: Path, checkpoint: Path) -> None:
    """Put what `keep` has written into a checkpoint."""
    for name in (FILE, str(_read(output_dir).get("script", FILE))):
        if (output_dir / name).is_file():
            shutil.copy(output_dir / name, checkpoint)


def _refuse(args: CommonArgs, earlier: Path | None, changes: list[str]) -> None:
    for change in changes:
        if not args.accept_changes:
            raise UserError(
                f"{earlier}: {change}: the same command would go on with another run; --accept_changes does so, "
                "--overwrite_output_dir starts over, or choose another --output_dir"
            )
        say(f"{earlier}: {change} (--accept_changes)")


def _read(folder: Path | None) -> dict[str, Any]:
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8")) if folder else {}
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def _code(script: Path) -> str:
    """The code of a script, without its comments, docstrings and layout."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body[0].value.value = ""
    return ast.dump(tree)
