"""The output folder: its contents, their integrity, which run owns it, and what a new run may do with it.

A checkpoint counts as intact only if its files match the sizes and hashes in its `manifest.json`.
"""

import atexit
import contextlib
import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from common.args import CommonArgs, MayChange, may_change
from common.data.folders import flush
from common.errors import UserError, say

import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

LINES = ("metrics.jsonl", "samples.jsonl", "completions.jsonl", "regression.jsonl")  # an object per line, with its step
WEIGHTS = ("model*.safetensors*", "adapter_*", "extra.safetensors")  # of an exported model
MODEL = ("config.json", "generation_config.json", "tokenizer*", "chat_template*", "special_tokens_map.json")
MODEL += ("added_tokens.json", "vocab.*", "merges.txt", "*.model")  # and their companions, depending on the tokenizer
NOTES = ("args.yaml", "inputs.json", "dataset.json", "tracker.json", "summary.json", "events.jsonl", "report.html")
CLASSIFIER = "classifier"  # a reward model
CARD, SEAL = "README.md", "<!-- written by a run of Plainloop; one that was edited stays as it is: {} -->\n"
GATHERED = ".export.weights.tmp"  # the gathered weights of sharded processes, before they become the final model
READERS = 8  # threads that hash the files of a checkpoint
_LOCKS: dict[Path, TextIO] = {}  # our locks, kept open: closing any handle of the file would release the lock


def checkpoints(output_dir: str) -> list[Path]:
    """The checkpoint folders, oldest first."""
    found = [p for p in Path(output_dir).glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=step_of)


def newest_intact(output_dir: str) -> Path | None:
    """The newest checkpoint that verifies; prints the ones that were passed over."""
    for checkpoint in reversed(checkpoints(output_dir)):
        if (problem := find_damage(checkpoint)) is None:
            return checkpoint
        say(f"{checkpoint} is passed over: {problem}")
    return None


def find_damage(checkpoint: Path) -> str | None:
    """The damage of a checkpoint, or None if each file matches the size and hash in the manifest."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        for name, (size, _) in files.items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} is damaged"
        with ThreadPoolExecutor(READERS) as pool:  # shards are many large files
            digests = pool.map(lambda name: file_hash(checkpoint / name), files)
            for name, digest in zip(files, digests, strict=True):
                if files[name][1] != digest:
                    return f"{name} is damaged"
        return None if "trainer_state.json" in files else "manifest.json does not list trainer_state.json"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json cannot be read ({type(error).__name__})"


def earlier_args(folder: str | Path) -> dict[str, Any] | None:
    """The arguments of the run in a folder. None: there is no run; {}: they cannot be read."""
    # A run that ended before its first metric or checkpoint left nothing worth keeping.
    begun = any(Path(folder, name).exists() for name in ("metrics.jsonl", "summary.json")) or checkpoints(str(folder))
    return _read_args(Path(folder)) if begun else None


def claim_output_dir(arguments: CommonArgs, saved_args: dict[str, Any] | None, processes: int | None = None) -> Path | None:
    """Decide what this run does with its output folder; returns the checkpoint to resume from, if any.

    saved_args: see earlier_args; processes: of this run. Raises UserError if resuming would mix two different runs, and
    SystemExit(0) if the same run is already complete. Deletes nothing.
    """
    args, allowed = vars(arguments), may_change(type(arguments))
    output_dir, resume_from = args["output_dir"], args["resume_from_checkpoint"]
    here, again = Path(output_dir).resolve(), "--overwrite_output_dir starts over, or choose another --output_dir"
    refuse_what_is_not_ours(arguments, saved_args)
    named = None if resume_from in ("auto", "none") else Path(resume_from)
    inside = named is not None and named.resolve().is_relative_to(here)
    if named and not (named / "manifest.json").exists():
        wanted = f"expected auto, none, or a folder like {output_dir}/checkpoint-500, with its manifest.json"
        raise UserError(f"--resume_from_checkpoint {resume_from}: there is no checkpoint; {wanted}")
    if named and (problem := find_damage(named)) is not None:
        raise UserError(f"--resume_from_checkpoint {resume_from}: {problem}")
    if args["overwrite_output_dir"] or saved_args is None:
        if inside and args["overwrite_output_dir"]:
            raise UserError(f"--resume_from_checkpoint {resume_from} lies in the folder that --overwrite_output_dir empties")
        if named:
            _compare(
                args, allowed, _read_args(named), named, processes, "to start from its weights, use --model_name_or_path"
            )
        return named
    if named and not inside and saved_args.get("resume_from_checkpoint") != resume_from:
        raise UserError(f"{output_dir} holds another run than that of {resume_from}: {again}")
    checkpoint = named if inside else newest_intact(output_dir) or named
    before = (checkpoint and _read_args(checkpoint)) or saved_args
    if not before:
        raise UserError(f"{output_dir} holds a run whose args.yaml cannot be read: {again}")
    if resume_from == "none":
        raise UserError(f"{output_dir} holds an earlier run: {again}")
    complete = not inside and Path(output_dir, "summary.json").exists()
    _compare(args, allowed, before, None if complete else checkpoint, processes, again)
    if complete:
        changed = _changed(args, saved_args or before)
        longer = any(allowed[name] == "length" for name in changed)
        if not longer or 0 < args["max_steps"] <= _last_step(output_dir):
            if course := [name for name in changed if allowed[name] in ("course", "length")]:
                shown = _shown(args, saved_args or before, course)
                raise UserError(
                    f"{output_dir} holds a complete run ({shown}): a larger --max_steps goes on with it; {again}"
                )
            say(f"{output_dir} holds this very run, complete: {again}")
            if args["push_to_hub"]:
                say(f"to send it to the Hub: {push_command(arguments)}")
            raise SystemExit(0)
        if checkpoint is None:
            raise UserError(f"{output_dir} holds a complete run, and no checkpoint to go on from: {again}")
        _compare(args, allowed, before, checkpoint, processes, again)
    return checkpoint


def push_command(args: CommonArgs) -> str:
    """The command that pushes a finished run's model to the Hub."""
    private = " --hub_private_repo" if args.hub_private_repo else ""
    return f"python -m tools.push {shlex.quote(args.output_dir)} --hub_model_id {args.hub_model_id}{private}"


def refuse_what_is_not_ours(arguments: CommonArgs, saved_args: dict[str, Any] | None, script: str = "") -> None:
    """Raise UserError if this run would overwrite the model it starts from, or files that no run has written.

    saved_args: see earlier_args. script: the one that the run will copy to the folder.
    """
    folder, here = Path(arguments.output_dir), Path(arguments.output_dir).resolve()
    if not arguments.output_dir.strip():
        raise UserError("--output_dir is empty: it names the folder for everything that the run writes")
    if arguments.model_name_or_path and Path(arguments.model_name_or_path).resolve().is_relative_to(here):
        raise UserError(f"--output_dir {folder} holds the model to start from: choose another")
    ours = (*WEIGHTS, *LINES, *NOTES, *MODEL)
    for flag in ("dataset_name", "eval_dataset_name", "eval_prompts", "regression_suite"):
        words = getattr(arguments, flag) or []
        for word in [words] if isinstance(words, str) else words:
            path = re.search(r'"path"\s*:\s*"([^"]*)"', word) if word.lstrip().startswith("{") else None
            data = Path(path[1] if path else word).expanduser().resolve()
            if data == here or (data.parent == here and any(data.match(pattern) for pattern in ours)):
                raise UserError(f"--output_dir {folder} holds the data of --{flag} {word}: choose another")
    if saved_args is not None:
        return
    # With args.yaml, a run was started here, and left neither a model nor anything else worth keeping.
    patterns = WEIGHTS if _read_args(folder) else ours
    found = [file for pattern in patterns for file in sorted(folder.glob(pattern)) if file.is_file()]
    if script and patterns is ours and (copy := folder / Path(script).name).exists() and not copy.samefile(script):
        found.append(copy)
    if found:
        raise UserError(f"--output_dir {folder} holds {found[0].name}, which no run has left there: choose another")


def lock(accelerator: Accelerator, output_dir: Path) -> None:
    """Lock the folder for the lifetime of this run. Called on every process. Raises UserError if another run holds it.

    A POSIX record lock of the main process on `.lock`: the kernel, or the server of a shared disk, releases it however the
    process ends. If the disk does not support locks, a line says so and nothing is locked.
    """
    problem = [_lock(output_dir) if accelerator.is_main_process else None]
    if (problem := broadcast_object_list(problem)[0]) is not None:
        raise UserError(problem)


def _lock(output_dir: Path) -> str | None:
    """Returns the message for the user if this process cannot have the lock, else None."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    path = output_dir.resolve() / ".lock"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        if not is_held(output_dir):  # the lock of a folder that has been deleted
            _LOCKS.pop(path).close()
        file = _LOCKS.get(path) or open(path, "a+", encoding="utf-8")
    except OSError as error:
        return f"--output_dir {output_dir}: cannot be written: {error}"
    if path not in _LOCKS:
        atexit.register(file.close)
    _LOCKS[path] = file
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            say(f"{output_dir}: its disk knows no locks ({error}): see to it that no second run uses it")
            return None
        file.seek(0)
        return f"{output_dir} is in use by {file.read(200)}: wait for it, stop it, or choose another --output_dir"
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
    file.flush()
    return None


def is_held(output_dir: Path) -> bool:
    """Whether this process's lock is still that of the folder, which may have been deleted and recreated by another run.
    True if no lock was taken."""
    path = output_dir.resolve() / ".lock"
    if path not in _LOCKS:
        return True
    try:
        return os.path.samestat(os.fstat(_LOCKS[path].fileno()), path.stat())
    except OSError:
        return False


def is_over(output_dir: Path) -> bool:
    """Whether the last run in the folder has ended, by its lock, which was taken on this machine and is free. Locks of other
    machines are not always visible here."""
    path = output_dir.resolve() / ".lock"
    if path in _LOCKS:  # closing another handle would release our own lock
        return False
    try:
        import fcntl

        with open(path, encoding="utf-8") as file:
            here = f" on {socket.gethostname()}, since" in file.read(400)
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (ImportError, OSError, ValueError):
        return False
    return here


def delete_run(output_dir: Path) -> None:
    """Delete what a run has written to its folder, and nothing else there."""
    for folder in [
        *checkpoints(str(output_dir)),
        *output_dir.glob(".checkpoint-*.tmp"),
        *output_dir.glob(".export.tmp"),
        *output_dir.glob(".push.tmp"),
    ]:
        shutil.rmtree(folder)
    (output_dir / GATHERED).unlink(missing_ok=True)
    for pattern in (*LINES, *NOTES, *WEIGHTS):
        for file in output_dir.glob(pattern):
            file.unlink()
    if is_sealed(output_dir / CARD):
        (output_dir / CARD).unlink()


def write_manifest(folder: Path, known: Mapping[str, tuple[int, str]] | None = None) -> None:
    """Flush every file to disk and list it in manifest.json.

    known: sizes and hashes of files flushed by other processes. Raises OSError if one of them is not visible here.
    """
    files, manifest = dict(known or {}), folder / "manifest.json"
    for name, (size, _) in files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            raise OSError(errno.ENOENT, "what another process has written is not seen here (a disk of its own?)", name)
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p != manifest):
        if (name := path.relative_to(folder).as_posix()) not in files:
            flush(path)
            files[name] = (path.stat().st_size, file_hash(path))
    manifest.write_text(json.dumps({"files": files}, indent=1))
    flush(manifest)
    for path in [p for p in folder.rglob("*") if p.is_dir()] + [folder]:
        flush(path)


@contextlib.contextmanager
def writing(output_dir: str | Path) -> Iterator[None]:
    """Wraps writes that a run cannot do without. Raises UserError if the disk refuses them."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{output_dir} cannot be written ({error}): make room; the same command goes on from the last checkpoint"
        ) from None


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: a kill leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    os.replace(temporary, path)


def seal(text: str) -> str:
    """A text with a mark appended by which `is_sealed` recognises it."""
    text = text.rstrip() + "\n\n"
    return text + SEAL.format(hashlib.sha256(text.encode()).hexdigest()[:16])


def is_sealed(path: Path) -> bool:
    """Whether a file is unchanged since a run wrote it: not the user's own, and not edited."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    body = text[: text.rfind("<!-- ")]
    return bool(body) and text == seal(body)


def _compare(
    args: dict[str, Any],
    allowed: dict[str, MayChange | None],
    before: dict[str, Any],
    checkpoint: Path | None,
    processes: int | None,
    instead: str,
) -> None:
    """Raise UserError if the arguments would make a different run; print the other arguments that have changed.

    allowed: what may change (see args.may_change). checkpoint: the one to resume from; with None nothing is printed.
    before: the earlier arguments; {} if unknown.
    """
    changed = _changed(args, before) if before else []
    compared = args.get("save_best") and args["save_best"] == before.get("save_best")
    fixed = (None, "evaluation") if compared else (None,)  # evaluations that are compared have to measure the same
    if refused := [name for name in changed if allowed[name] in fixed]:
        raise UserError(f"{checkpoint or args['output_dir']} is of another run ({_shown(args, before, refused)}): {instead}")
    if checkpoint is None:
        return
    for name in changed:
        say(f"{name}: {before.get(name)} -> {args[name]}")
    now = processes or 1
    then = (read_state(checkpoint) or {}).get("processes", now) if processes else now
    if now != then:
        say(f"processes: {then} -> {now}")


def _changed(args: dict[str, Any], before: dict[str, Any]) -> list[str]:
    return [name for name in args if args[name] != _as_it_is_now(before.get(name), args[name])]


def _as_it_is_now(before: Any, now: Any) -> Any:
    """The earlier value of a flag that takes several values now but took one when the run was started."""
    return [before] if isinstance(now, list) and before is not None and not isinstance(before, list) else before


def _shown(args: dict[str, Any], before: dict[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name} {before.get(name)} -> {args[name]}" for name in names)


def _read_args(folder: Path) -> dict[str, Any]:
    """args.yaml of a run or a checkpoint; {} if missing or unreadable."""
    try:
        found = yaml.safe_load((folder / "args.yaml").read_text(encoding="utf-8"))
        sizes = [found[name] for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return {}
    return found if all(isinstance(size, int) for size in sizes) else {}


def read_state(checkpoint: Path) -> dict[str, Any] | None:
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        return state if isinstance(state["step"], int) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _last_step(output_dir: str) -> float:
    """The last step of a complete run; 0 if it cannot be read."""
    try:
        return float(json.loads(Path(output_dir, "summary.json").read_text(encoding="utf-8"))["final"]["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
