"""The output folder: which run owns it, what a new run may do with it, and what that run was made of.

A run is made of its arguments (args.yaml) and its inputs (inputs.json): hashes of the script, of files and
models that arguments name, of the training data and the user's loaded code, and the precision. Both are kept
in each checkpoint, too, and a run that resumes is compared with them.
"""

from collections.abc import Callable, Iterable, Iterator
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
from common.files import code_hash, file_hash, find_damage, writing
from common.processes import on_main_process
import yaml

# The files of a run; those of LINES have an object per line, with its step.
LINES = ("metrics.jsonl", "samples.jsonl", "completions.jsonl", "regression.jsonl")
RUN_FILES = ("args.yaml", "inputs.json", "dataset.json", "summary.json", "events.jsonl", "report.html")
# The files of an exported model; the last ones depend on the tokenizer.
WEIGHTS = ("model*.safetensors*", "adapter_*", "extra.safetensors")
MODEL = ("config.json", "generation_config.json", "tokenizer*", "chat_template*", "special_tokens_map.json")
MODEL += ("added_tokens.json", "vocab.*", "merges.txt", "*.model")
CLASSIFIER = "classifier"  # a reward model
OWN = ("output_dir", "dataset_cache_dir")  # paths that a run writes to
HOW_TO_START_OVER = (
    "choose another --output_dir, or start over with --overwrite_output_dir "
    "(to start a new run from these weights: --model_name_or_path)"
)
_LOCKS: dict[Path, TextIO] = {}  # our locks, kept open: closing any handle of the file would release the lock
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_LOCKS.clear)  # a child has none of them


# --- its content ------------------------------------------------------------------------------------------


def checkpoint_at(output_dir: str | Path, step: int) -> Path:
    return Path(output_dir, f"checkpoint-{step}")


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def checkpoints(output_dir: str | Path) -> list[Path]:
    """The checkpoint folders, oldest first."""
    folders = []
    for path in Path(output_dir).glob("checkpoint-*"):
        if path.name.removeprefix("checkpoint-").isdecimal():
            folders.append(path)
    return sorted(folders, key=step_of)


def matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """The files and folders in a folder whose names match one of the patterns."""
    paths = set()
    for pattern in patterns:
        paths.update(folder.glob(pattern))
    return sorted(paths)


def newest_intact(output_dir: str | Path) -> Path | None:
    """The newest checkpoint whose files are as they were written; prints which newer ones are damaged."""
    for checkpoint in reversed(checkpoints(output_dir)):
        problem = find_damage(checkpoint)
        if problem is None:
            return checkpoint
        say(f"{checkpoint} is passed over: {problem}")
    return None


def read_object(path: Path, parse: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    """A JSON object; {} if the file is missing or holds something else."""
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def read_args(folder: Path) -> dict[str, Any]:
    """args.yaml of a run or a checkpoint; {} if missing or unreadable."""
    return read_object(folder / "args.yaml", yaml.safe_load)


def earlier_args(folder: Path) -> dict[str, Any] | None:
    """The arguments of the run in a folder. None: there is no run; {}: they cannot be read."""
    # A run that ended before its first metric or checkpoint left nothing worth keeping.
    if (folder / "metrics.jsonl").exists() or (folder / "summary.json").exists() or checkpoints(folder):
        return read_args(folder)
    return None


# --- its owner --------------------------------------------------------------------------------------------


def open_folder(
    args: CommonArgs, accelerator: Accelerator, script: str
) -> tuple[Path | None, dict[str, str]]:
    """Lock args.output_dir for this run; returns the checkpoint to resume from, or None for a new run, and
    the inputs that are known at the start. Called on every process.

    Raises UserError if the folder is in use, or holds files that no run has written, or another run; see
    `resume_point`.
    """

    # On the main process alone: another machine may have another disk.
    def lock_and_look() -> tuple[Path | None, dict[str, str]]:
        refuse_foreign_folder(args)  # before a lock is made there
        lock(Path(args.output_dir))
        inputs = inputs_at_start(args, script, accelerator.mixed_precision)
        return resume_point(args, inputs), inputs

    return on_main_process(accelerator, lock_and_look)


def refuse_foreign_folder(args: CommonArgs) -> None:
    """Raise UserError if the run would write over what it reads, or over files that no run has written."""
    folder = Path(args.output_dir)
    for flag, name in words_of(args):
        is_read = declared(type(args), flag)["is_path"] and flag not in OWN
        if is_read and name and os.path.exists(name):
            if Path(name).resolve().is_relative_to(folder.resolve()):
                raise UserError(f"--output_dir {folder} holds the {name} of --{flag}: choose another")
    if earlier_args(folder) is not None:
        return
    foreign = (*WEIGHTS, *MODEL, *LINES, *RUN_FILES)
    if read_args(folder):
        foreign = WEIGHTS  # a run that ended early has none; a checkpoint, or a copy of a model, has
    for path in matching(folder, foreign):
        if path.is_file():
            raise UserError(f"--output_dir {folder} holds {path.name}, but no run: choose another")


def words_of(args: CommonArgs) -> Iterator[tuple[str, Any]]:
    """(flag, value) of every argument; of a list, each of its values."""
    for flag, value in vars(args).items():
        for word in value if isinstance(value, list) else [value]:
            yield flag, word


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
            return say(f"{folder} cannot be locked ({error}): make sure that no other run uses it")
        _LOCKS.pop(path)  # another run's
        raise UserError(
            f"{folder} is in use by {path.read_text()}: stop it, or choose another --output_dir"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()


def remove_if_unused(folder: Path) -> None:
    """Remove the folder of a run that failed at its start, if its lock is all that this process made there."""
    path = folder.resolve() / ".lock"
    with contextlib.suppress(OSError):
        if path in _LOCKS and os.listdir(path.parent) == [path.name]:
            path.unlink()
            path.parent.rmdir()


def is_held(folder: Path) -> bool:
    """Whether the folder is the one that this process has locked, and not deleted since. False, too, in a
    forked child, and for a relative path in another working directory."""
    path = folder.resolve() / ".lock"
    try:
        return os.path.samestat(os.fstat(_LOCKS[path].fileno()), path.stat())
    except (OSError, KeyError):
        return False


def refuse_deleted_folder(accelerator: Accelerator, folder: Path) -> None:
    """Raise UserError if the folder is not the one that the run has locked. Called on every process."""
    if not on_main_process(accelerator, lambda: is_held(folder)):
        raise UserError(
            f"{folder} was deleted while this run was writing to it, or the working directory has changed, or this process "
            "is a fork of the run's"
        )


# --- what a new run does with it ----------------------------------------------------------------------------


def resume_point(args: CommonArgs, inputs: dict[str, str]) -> Path | None:
    """Decide what this run does with its folder; returns the checkpoint to resume from, or None for a new
    run. Deletes nothing.

    | the folder holds                    | this run                                                  |
    |-------------------------------------|-----------------------------------------------------------|
    | no run                              | is new, or resumes from a named checkpoint of another run |
    | any run, and --overwrite_output_dir | the same                                                  |
    | an unfinished run                   | resumes from its newest intact checkpoint                 |
    | one without an intact checkpoint    | starts again, at step 0 or at the named checkpoint        |
    | a complete run of this length       | ends with SystemExit(0)                                   |
    | a complete run that is to be longer | resumes like an unfinished one                            |

    inputs: see inputs_at_start. Raises UserError if two different runs would be mixed.
    """
    folder = Path(args.output_dir)
    wanted = args.resume_from_checkpoint
    named = None if wanted.lower() in ("auto", "true", "none") else Path(wanted)
    saved = None if args.overwrite_output_dir else earlier_args(folder)
    if saved is None:
        if named is None:
            return None
        is_complete = False
        checkpoint = named
    else:
        is_other = named and saved.get("resume_from_checkpoint") != wanted
        if is_other or wanted.lower() == "none":
            raise UserError(f"{folder} holds an earlier run: {HOW_TO_START_OVER}")
        is_complete = (folder / "summary.json").exists()
        checkpoint = newest_intact(folder) or named
    if named and checkpoint == named:
        problem = find_damage(named)
        if problem:
            expected = (
                "expected auto, none, or a checkpoint of another folder, like outputs/sft/checkpoint-500"
            )
            raise UserError(f"--resume_from_checkpoint {named}: {problem}; {expected}")
    earlier = folder if is_complete or checkpoint is None else checkpoint
    before = read_args(earlier)
    if not before:
        raise UserError(f"{earlier} is of a run whose args.yaml cannot be read: {HOW_TO_START_OVER}")
    changed = _refuse_other_run(args, before, earlier)
    if is_complete or checkpoint:
        refuse_changes(args, inputs, earlier)
    if is_complete:
        _leave_complete_run(args, changed)
        if checkpoint is None:
            raise UserError(
                f"{folder} holds a complete run, and no checkpoint to go on from: {HOW_TO_START_OVER}"
            )
    for name, (then, now) in changed.items():
        say(f"{name}: {then} -> {now}")
    return checkpoint


def _refuse_other_run(args: CommonArgs, before: dict[str, Any], earlier: Path) -> dict[str, tuple[Any, Any]]:
    """{name: (then, now)} of the arguments that have changed. Raises UserError if one of them makes it
    another run."""
    then = defaults(type(args)) | before  # a flag that did not exist yet had its default
    changed = {}
    for name, now in vars(args).items():
        if then[name] != now:
            changed[name] = (then[name], now)
    refused = ["no"]
    if args.save_best and _metric(args.save_best) == _metric(before.get("save_best")):
        refused.append("evaluation")  # evaluations that are compared have to measure the same
    changes = _changes_of(args, changed, refused)
    if changes:
        raise UserError(f"{earlier} is of another run ({changes}): {HOW_TO_START_OVER}")
    return changed


def _metric(save_best: str | None) -> str:
    return re.sub("^(min:|max:)?(eval_)?", "", str(save_best))


def _leave_complete_run(args: CommonArgs, changed: dict[str, tuple[Any, Any]]) -> None:
    """Raise SystemExit(0) for the same run once more, and UserError if it would be trained in another way;
    return if it is to be longer."""
    last_step = read_object(Path(args.output_dir, "summary.json")).get("final", {}).get("step", 0)
    has_other_length = bool(_changes_of(args, changed, ["duration"]))
    ends_earlier = 0 < args.max_steps <= last_step
    if has_other_length and not ends_earlier:
        return
    changes = _changes_of(args, changed, ["training", "duration"])
    if changes:
        longer = f"a larger --max_steps goes on with it; {HOW_TO_START_OVER}"
        raise UserError(f"{args.output_dir} holds a complete run ({changes}): {longer}")
    say(f"{args.output_dir} holds this very run, complete: {HOW_TO_START_OVER}")
    raise SystemExit(0)


def _changes_of(args: CommonArgs, changed: dict[str, tuple[Any, Any]], kinds: list[str | None]) -> str:
    """For a message, the changed arguments whose `may_change` is one of these."""
    effects = may_change(type(args))
    changes = []
    for name, (then, now) in changed.items():
        if effects[name] in kinds:
            changes.append(f"{name} {then} -> {now}")
    return ", ".join(changes)


def write_settings(args: CommonArgs, script: str, inputs: dict[str, str]) -> None:
    """Write the settings of this run to its folder; with --overwrite_output_dir, first delete the earlier run
    there.

    Called once data and model are loaded, so that a misspelt path never costs a finished run. Raises OSError.
    """
    folder = Path(args.output_dir)
    if args.overwrite_output_dir and earlier_args(folder) is not None:
        delete_run(folder)
    (folder / "summary.json").unlink(missing_ok=True)  # it marks a complete run
    save_args(args, folder / "args.yaml")
    Path(folder, Path(script).name).write_bytes(Path(script).read_bytes())  # it may be the same file
    (folder / "inputs.json").write_text(json.dumps(inputs, indent=1, ensure_ascii=False), encoding="utf-8")


def delete_run(folder: Path) -> None:
    """Delete what a run has written to its folder and the next one would not replace, and nothing else
    there."""
    unfinished = matching(folder, (".checkpoint-*.tmp", ".export.tmp", "bad_batches"))
    for path in checkpoints(folder) + unfinished:
        shutil.rmtree(path)
    for file in matching(folder, (*LINES, *RUN_FILES, *WEIGHTS)):
        file.unlink()


# --- what the run was made of -------------------------------------------------------------------------------


def inputs_at_start(args: CommonArgs, script: str, mixed_precision: str) -> dict[str, str]:
    """{what: its hash} of the inputs known at the start: the script, the precision, code that arguments name,
    and model folders (the reference, the base under an adapter, a reward model)."""
    inputs = {"the script": code_hash(Path(script)), "the mixed precision": mixed_precision}
    words = {str(word) for _, word in words_of(args)}
    adapter = read_object(Path(str(args.model_name_or_path), "adapter_config.json"))
    words.add(str(adapter.get("base_model_name_or_path")))
    # Their results are compared over the run.
    compared = (args.eval_prompts, args.regression_suite) if args.save_best else ()
    for word in words - {args.output_dir}:
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
    before = read_object(earlier / "inputs.json")
    changed = [what for what, now in inputs.items() if before.get(what, now) != now]
    if not changed:
        return
    message = f"{earlier}: changed since then: {', '.join(changed)}"
    if not args.accept_changes:
        raise UserError(f"{message}: --accept_changes resumes in spite of that; or {HOW_TO_START_OVER}")
    say(f"{message} (--accept_changes)")


def model_hash(folder: Path) -> str:
    """A hash of a model folder: weights, configuration, tokenizer.

    Of a large file it covers the first MB and 4 KB of each further MB. That is enough, because training changes
    every tensor.
    """
    digest = hashlib.sha256()
    for path in matching(folder, (*WEIGHTS, *MODEL, "*.bin", "*.py", "*.jinja")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            for at in range(0, size, 2**20):
                file.seek(at)
                digest.update(file.read(2**20 if at == 0 or size <= 2**26 else 2**12))
    return digest.hexdigest()
