"""The output folder: which run owns it, what a new run may do with it, and what that run was made of.

A run is made of its arguments (args.yaml) and its inputs (inputs.json): hashes of the script, of files and
models that arguments name, of the training data and the user's loaded code, and the precision. Both are kept
in each checkpoint, too, and a run that resumes is compared with them.
"""

import ast
from collections.abc import Callable
import contextlib
import errno
import hashlib
import json
import os
from pathlib import Path
import re
import shutil
import socket
from typing import Any, TextIO

from accelerate import Accelerator
from common.args import CommonArgs, declared, defaults, may_change, save_args
from common.errors import UserError, say
from common.files import file_hash, find_damage, writing
from common.processes import on_main_process
import yaml

# an object per line, with its step
LINES = ("metrics.jsonl", "samples.jsonl", "completions.jsonl", "regression.jsonl")
NOTES = ("args.yaml", "inputs.json", "dataset.json", "summary.json", "events.jsonl", "report.html")
WEIGHTS = ("model*.safetensors*", "adapter_*", "extra.safetensors")  # of an exported model
MODEL = ("config.json", "generation_config.json", "tokenizer*", "chat_template*", "special_tokens_map.json")
# and their companions, depending on the tokenizer
MODEL += ("added_tokens.json", "vocab.*", "merges.txt", "*.model")
CLASSIFIER = "classifier"  # a reward model
OWN = ("output_dir", "dataset_cache_dir")  # paths that a run writes to
OTHERWISE = "choose another --output_dir, or start over with --overwrite_output_dir (weights alone: --model_name_or_path)"
_LOCKS: dict[Path, TextIO] = {}  # our locks, kept open: closing any handle of the file would release the lock


# --- what is in it ------------------------------------------------------------------------------------------


def checkpoint_at(output_dir: str | Path, step: int) -> Path:
    return Path(output_dir, f"checkpoint-{step}")


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def checkpoints(output_dir: str | Path) -> list[Path]:
    """The checkpoint folders, oldest first."""
    found = [
        path
        for path in Path(output_dir).glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdecimal()
    ]
    return sorted(found, key=step_of)


def newest_intact(output_dir: str | Path) -> Path | None:
    """The newest checkpoint whose files are as they were written; prints the ones that were passed over."""
    for checkpoint in reversed(checkpoints(output_dir)):
        if (problem := find_damage(checkpoint)) is None:
            return checkpoint
        say(f"{checkpoint} is passed over: {problem}")
    return None


def read_json(path: Path, parse: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    """A JSON object; {} if the file is missing or holds something else."""
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def read_args(folder: Path) -> dict[str, Any]:
    """args.yaml of a run or a checkpoint; {} if missing or unreadable."""
    return read_json(folder / "args.yaml", yaml.safe_load)


def earlier_args(folder: Path) -> dict[str, Any] | None:
    """The arguments of the run in a folder. None: there is no run; {}: they cannot be read."""
    # A run that ended before its first metric or checkpoint left nothing worth keeping.
    begun = (folder / "metrics.jsonl").exists() or (folder / "summary.json").exists() or checkpoints(folder)
    return read_args(folder) if begun else None


# --- whose it is --------------------------------------------------------------------------------------------


def open_folder(
    args: CommonArgs, accelerator: Accelerator, script: str
) -> tuple[Path | None, dict[str, str]]:
    """Lock args.output_dir for this run; returns the checkpoint to resume from, or None to begin, and the
    inputs known so far. Called on every process.

    Raises UserError if the folder is in use, or holds what no run has written, or another run; see `claim`
    for the rest.
    """

    # by one process: another machine may have another disk
    def open_it() -> tuple[Path | None, dict[str, str]]:
        refuse_foreign_folder(args)  # before a lock is made there
        lock(Path(args.output_dir))
        inputs = known_inputs(args, script, accelerator.mixed_precision)
        return claim(args, inputs), inputs

    return on_main_process(accelerator, open_it)


def refuse_foreign_folder(args: CommonArgs) -> None:
    """Raise UserError if the run would write over what it reads, or over files that no run has written."""
    folder = Path(args.output_dir)
    for flag, named in vars(args).items():
        reads = declared(type(args), flag)["is_path"] and flag not in OWN
        for name in (named if isinstance(named, list) else [named]) if reads and named else []:
            if os.path.exists(name) and Path(name).resolve().is_relative_to(folder.resolve()):
                raise UserError(f"--output_dir {folder} holds the {name} of --{flag}: choose another")
    if earlier_args(folder) is None and not read_args(folder):
        found = [
            file
            for pattern in (*WEIGHTS, *MODEL, *LINES, *NOTES)
            for file in folder.glob(pattern)
            if file.is_file()
        ]
        if found:
            raise UserError(
                f"--output_dir {folder} holds {found[0].name}, which no run has written: choose another"
            )


def lock(folder: Path) -> None:
    """Lock the folder for the lifetime of this process. Raises UserError if another run holds it.

    A POSIX record lock on `.lock`: the kernel, or the server of a shared disk, releases it however the
    process ends. If the disk does not support locks (or this is Windows), a line says so and nothing is
    locked.
    """
    path = folder.resolve() / ".lock"
    if path in _LOCKS:  # of an earlier run of this process
        _LOCKS.pop(path).close()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = _LOCKS[path] = open(path, "a", encoding="utf-8")
    try:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        if getattr(error, "errno", None) not in (errno.EACCES, errno.EAGAIN):
            return say(f"{folder} cannot be locked ({error}): see to it that no second run uses it")
        _LOCKS.pop(path)  # it is another's
        raise UserError(
            f"{folder} is in use by {path.read_text()}: stop it, or choose another --output_dir"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()


def remove_if_unused(folder: Path) -> None:
    """Remove a folder in which this process has made nothing but its lock: of a run that failed at its start."""
    path = folder.resolve() / ".lock"
    with contextlib.suppress(OSError):
        if path in _LOCKS and os.listdir(path.parent) == [path.name]:
            path.unlink()
            path.parent.rmdir()


def is_held(folder: Path) -> bool:
    """Whether the folder is still the one that this process has locked, and not deleted since. True if no
    lock was taken."""
    path = folder.resolve() / ".lock"
    try:
        return path not in _LOCKS or os.path.samestat(os.fstat(_LOCKS[path].fileno()), path.stat())
    except OSError:
        return False


def refuse_deleted_folder(accelerator: Accelerator, folder: Path) -> None:
    """Raise UserError if the folder was deleted while the run was writing to it. Called on every process."""
    if not on_main_process(accelerator, lambda: is_held(folder)):
        raise UserError(f"{folder} was deleted while this run was writing to it")


# --- what a new run does with it ----------------------------------------------------------------------------


def claim(args: CommonArgs, inputs: dict[str, str]) -> Path | None:
    """Decide what this run does with its folder; returns the checkpoint to resume from, or None to begin.
    Deletes nothing.

    | the folder holds                    | this run                                               |
    |-------------------------------------|--------------------------------------------------------|
    | no run                              | begins, or goes on from a named checkpoint of another  |
    | any run, and --overwrite_output_dir | the same                                               |
    | an unfinished run                   | goes on from its newest intact checkpoint              |
    | a complete run of this length       | ends with SystemExit(0)                                |
    | a complete run that is to be longer | goes on like an unfinished one                         |

    inputs: see known_inputs. Raises UserError if two different runs would be mixed.
    """
    folder, wanted = Path(args.output_dir), args.resume_from_checkpoint
    named = None if wanted.lower() in ("auto", "true", "none") else Path(wanted)
    saved = None if args.overwrite_output_dir else earlier_args(folder)
    if saved is None and named is None:
        return None
    if saved is not None and (
        wanted.lower() == "none" or (named and saved.get("resume_from_checkpoint") != wanted)
    ):
        raise UserError(f"{folder} holds an earlier run: {OTHERWISE}")
    is_complete = saved is not None and (folder / "summary.json").exists()
    checkpoint = named if saved is None else newest_intact(folder) or named
    if named and checkpoint == named and (problem := find_damage(named)):
        expected = "expected auto, none, or a checkpoint of another folder, like outputs/sft/checkpoint-500"
        raise UserError(f"--resume_from_checkpoint {named}: {problem}; {expected}")
    earlier = folder if is_complete or checkpoint is None else checkpoint
    before = read_args(earlier)
    if not before:
        raise UserError(f"{earlier} is of a run whose args.yaml cannot be read: {OTHERWISE}")
    changed = _refuse_other_run(args, before, earlier)
    if is_complete or checkpoint:
        refuse_changes(args, inputs, earlier)
    if is_complete:
        _leave_complete_run(args, changed)
        if checkpoint is None:
            raise UserError(f"{folder} holds a complete run, and no checkpoint to go on from: {OTHERWISE}")
    for name, (then, now) in changed.items():
        say(f"{name}: {then} -> {now}")
    return checkpoint


def _refuse_other_run(args: CommonArgs, before: dict[str, Any], earlier: Path) -> dict[str, tuple[Any, Any]]:
    """{name: (then, now)} of the arguments that have changed. Raises UserError if one of them makes it
    another run."""
    then = defaults(type(args)) | before  # a flag that did not exist yet had its default
    changed = {name: (then[name], now) for name, now in vars(args).items() if then[name] != now}
    allowed, fixed = may_change(type(args)), [None]
    metrics = [
        re.sub("^(min:|max:)?(eval_)?", "", str(name)) for name in (args.save_best, before.get("save_best"))
    ]
    if args.save_best and metrics[0] == metrics[1]:
        fixed.append("evaluation")  # evaluations that are compared have to measure the same
    if refused := [name for name in changed if allowed[name] in fixed]:
        raise UserError(f"{earlier} is of another run ({_shown(changed, refused)}): {OTHERWISE}")
    return changed


def _leave_complete_run(args: CommonArgs, changed: dict[str, tuple[Any, Any]]) -> None:
    """Raise SystemExit(0) for the same run once more, and UserError for another course; return if it is to be
    longer."""
    allowed = may_change(type(args))
    last_step = read_json(Path(args.output_dir, "summary.json")).get("final", {}).get("step", 0)
    if any(allowed[name] == "length" for name in changed) and not 0 < args.max_steps <= last_step:
        return
    if course := [name for name in changed if allowed[name] in ("course", "length")]:
        longer = f"a larger --max_steps goes on with it; {OTHERWISE}"
        raise UserError(f"{args.output_dir} holds a complete run ({_shown(changed, course)}): {longer}")
    say(f"{args.output_dir} holds this very run, complete: {OTHERWISE}")
    raise SystemExit(0)


def _shown(changed: dict[str, tuple[Any, Any]], names: list[str]) -> str:
    return ", ".join(f"{name} {changed[name][0]} -> {changed[name][1]}" for name in names)


def begin(args: CommonArgs, script: str, inputs: dict[str, str]) -> None:
    """Write the settings of this run to its folder; with --overwrite_output_dir, first delete the earlier run
    there.

    Called once data and model are loaded, so that a misspelt path never costs a finished run. Raises OSError.
    """
    folder = Path(args.output_dir)
    if args.overwrite_output_dir and earlier_args(folder) is not None:
        delete_run(folder)
    (folder / "summary.json").unlink(missing_ok=True)  # it marks a complete run
    save_args(args, folder / ".args.yaml.tmp")
    os.replace(folder / ".args.yaml.tmp", folder / "args.yaml")
    Path(folder, Path(script).name).write_bytes(Path(script).read_bytes())  # it may be the same file
    (folder / "inputs.json").write_text(json.dumps(inputs, indent=1, ensure_ascii=False), encoding="utf-8")


def delete_run(folder: Path) -> None:
    """Delete what a run has written to its folder and the next one would not replace, and nothing else
    there."""
    folders = [".checkpoint-*.tmp", ".export.tmp", "bad_batches"]
    for path in [*checkpoints(folder), *(path for pattern in folders for path in folder.glob(pattern))]:
        shutil.rmtree(path)
    for pattern in (*LINES, *NOTES, *WEIGHTS):
        for file in folder.glob(pattern):
            file.unlink()


# --- what the run was made of -------------------------------------------------------------------------------


def known_inputs(args: CommonArgs, script: str, mixed_precision: str) -> dict[str, str]:
    """{what: its hash} of the inputs known at the start: the script, the precision, code that arguments name,
    and model folders (the reference, the base under an adapter, a reward model)."""
    code = ast.dump(ast.parse(Path(script).read_text(encoding="utf-8")))  # without comments and layout
    inputs = {"the script": hashlib.sha256(code.encode()).hexdigest(), "the mixed precision": mixed_precision}
    words = [
        word for value in vars(args).values() for word in (value if isinstance(value, list) else [value])
    ]
    words.append(
        read_json(Path(str(args.model_name_or_path), "adapter_config.json")).get("base_model_name_or_path")
    )
    # whose values must stay comparable
    compared = (args.eval_prompts, args.regression_suite) if args.save_best else ()
    for word in {str(word) for word in words} - {args.output_dir}:
        path = Path(re.sub(r"\.py:\w+$", ".py", word))  # file.py:function
        with contextlib.suppress(OSError):  # not a file name, or unreadable: reported elsewhere
            if (path.suffix in (".py", ".jinja") or word in compared) and path.is_file():
                inputs[str(path)] = file_hash(path)
            elif (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
                inputs[str(path)] = model_hash(path)
    return inputs


def refuse_changes(args: CommonArgs, inputs: dict[str, str], earlier: Path) -> None:
    """Raise UserError if an input is no longer what it was; with --accept_changes print a line instead.

    earlier: the checkpoint, or the folder of a complete run.
    """
    before = read_json(earlier / "inputs.json")
    if changed := [what for what, now in inputs.items() if before.get(what, now) != now]:
        message = f"{earlier}: changed since then: {', '.join(changed)}"
        if not args.accept_changes:
            raise UserError(f"{message}: --accept_changes goes on all the same; or {OTHERWISE}")
        say(f"{message} (--accept_changes)")


def model_hash(folder: Path) -> str:
    """A hash of a model folder: weights, configuration, tokenizer.

    Of a large file it covers the first MB and 4 KB of each further MB: another training run changes every
    tensor.
    """
    digest = hashlib.sha256()
    files = {
        path for pattern in (*WEIGHTS, *MODEL, "*.bin", "*.py", "*.jinja") for path in folder.glob(pattern)
    }
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            for at in range(0, size, 2**20):
                file.seek(at)
                digest.update(file.read(2**20 if at == 0 or size <= 2**26 else 2**12))
    return digest.hexdigest()
