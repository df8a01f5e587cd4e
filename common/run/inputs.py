"""The inputs of a run besides its arguments: the script, the files and models that arguments name, the training data.

They are recorded in `inputs.json`, in the output folder and in each checkpoint, with a copy of the script. A resumed run is
checked against that record: if an input has changed, the two halves would belong to different runs.
"""

import ast
import contextlib
import hashlib
import json
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.args import CommonArgs
from common.errors import UserError, say

FILE = "inputs.json"
OUTPUTS = ("output_dir", "resume_from_checkpoint", "dataset_cache_dir")  # arguments whose folders change during a run
MODEL_FILES = (".safetensors", ".bin", ".json", ".jinja", ".model", ".py", ".txt")
MODEL_JSON = ("config", "adapter_config", "generation_config", "tokenizer", "special_tokens", "added_tokens", "vocab")


def inputs_of(args: CommonArgs, script: str) -> dict[str, Any]:
    """Inputs known at the start: {"script": its name, "files": {path: hash}}. The files are code that arguments name, and
    model folders: the reference, the base under an adapter, or a reward model."""
    files = {}
    for name, value in vars(args).items():
        for word in value if isinstance(value, list) else [value]:
            path = Path(re.sub(r"\.py:\w+$", ".py", str(word)))  # file.py:function
            with contextlib.suppress(OSError):  # not a file name, or unreadable: reported elsewhere
                if path.suffix in (".py", ".jinja") and path.is_file():
                    files[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
                elif name not in OUTPUTS and path.is_dir() and (found := _model_digest(path)):
                    files[str(path)] = found
    return {"script": Path(script).name, "files": files}


def loaded_code(script: str) -> dict[str, str]:
    """{path: hash} of the loaded Python files that belong neither to a library nor to this project, the script excepted: for
    instance what a reward function's file imports."""
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(__file__).parents[2] / "common"))
    found = {}
    for name, module in list(sys.modules.items()):
        path = str(getattr(module, "__file__", None) or "")
        if (
            name == "__main__"
            or path == script
            or not path.endswith(".py")
            or path.startswith(libraries)
            or "-packages" in path
        ):
            continue
        with contextlib.suppress(OSError):  # built in, or deleted since
            found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return found


def hub_commits(args: CommonArgs) -> dict[str, str]:
    """{name: commit} of the models and tokenizers from the Hub, as found in its cache once they are loaded."""
    from huggingface_hub import try_to_load_from_cache

    found = {}
    for name, revision in ((args.model_name_or_path, args.model_revision), (args.tokenizer_name, None)):
        if name is None or Path(name).exists():
            continue
        for file in ("config.json", "adapter_config.json", "tokenizer_config.json"):  # one may have been updated alone
            with contextlib.suppress(ValueError):  # not a valid Hub name: a folder that was deleted
                path = try_to_load_from_cache(name, file, revision=revision)
                if isinstance(path, str) and name not in found:
                    found[name] = Path(path).parent.name
    return found


def _model_digest(folder: Path, depth: int = 0) -> str | None:
    """A hash of a model folder's weights, configuration, tokenizer and adapter base; None if it is not a model folder."""
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json", "tokenizer.json")):
        return None
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in MODEL_FILES and path.is_file()):
        if path.suffix != ".json" or path.name.startswith(MODEL_JSON):
            digest.update(f"{path.name} {path.stat().st_size} ".encode())
            _update(digest, path)
    try:
        base = Path(json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"])
        if base.is_dir() and depth < 3:
            digest.update(str(_model_digest(base, depth + 1)).encode())
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return digest.hexdigest()


def _update(digest: Any, path: Path) -> None:
    """Add a file to a hash: all of a small one, and of a large one the first MB and 4 KB of each further MB. Another
    training run changes the numbers of every tensor, so samples suffice."""
    whole, size = 2**26, path.stat().st_size
    with open(path, "rb") as file:
        for at in range(0, size, 2**20):
            file.seek(at)
            digest.update(file.read(2**20 if at == 0 or size <= whole else 2**12))


def compare_script(args: CommonArgs, script: str, earlier: Path | None) -> None:
    """Refuse to resume if the script, or a file that an argument names, has changed.

    earlier: the checkpoint, or the folder of a complete run, if any. Raises UserError; with --accept_changes it prints a
    line instead.
    """
    before = _read(earlier)
    if not before:
        return
    changes = []
    copy, name = earlier / str(before.get("script")), Path(script).name
    if copy.is_file() and _code(copy) != _code(Path(script)):
        changes.append(f"{name} has been edited" if copy.name == name else f"it is a run of {copy.name}, and this is {name}")
    _refuse(args, earlier, changes + _changed(inputs_of(args, script), before, "files", "{} has been edited"))


def compare_rest(args: CommonArgs, inputs: Mapping[str, Any], checkpoint: Path | None) -> None:
    """The same check for inputs known once everything is loaded: training data, and code that rewards import.

    inputs: "data": a hash for each source, by its label; "code": see loaded_code; "hub": see hub_commits.
    """
    before = _read(checkpoint)
    changes = _changed(inputs, before, "data", "the rows of {} are not those that it had")
    changes += _changed(inputs, before, "code", "{} has been edited")
    _refuse(args, checkpoint, changes + _changed(inputs, before, "hub", "{} has another commit on the Hub"))


def _changed(now: Mapping[str, Any], before: Mapping[str, Any], kind: str, said: str) -> list[str]:
    known = before.get(kind, {})
    return [said.format(name) for name, digest in now[kind].items() if known.get(name, digest) != digest]


def keep(folder: Path, script: str, inputs: Mapping[str, Any]) -> None:
    """Write inputs.json and a copy of the script."""
    if not (folder / Path(script).name).exists() or not (folder / Path(script).name).samefile(script):
        shutil.copy(script, folder)
    (folder / FILE).write_text(json.dumps(inputs, indent=1, ensure_ascii=False), encoding="utf-8")


def copy_inputs(output_dir: Path, checkpoint: Path) -> None:
    """Copy the files written by `keep` into a checkpoint."""
    for name in kept_in(output_dir):
        if (output_dir / name).is_file():
            shutil.copy(output_dir / name, checkpoint)


def kept_in(folder: Path) -> tuple[str, str]:
    """The names of the files that `keep` wrote to a folder: inputs.json and the script."""
    return FILE, str(_read(folder).get("script", FILE))


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
    """The code of a script without comments, docstrings and layout."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body[0].value.value = ""
    return ast.dump(tree)
