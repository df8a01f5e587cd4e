"""The output folder: what lies in it, whether it is whole, whose it is, and what a run may do with it.

A checkpoint is listed in its `manifest.json` with sizes and hashes, and taken for whole only where they agree.
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
MODEL += ("added_tokens.json", "vocab.*", "merges.txt", "*.model")  # and what lies beside them, by the kind of tokenizer
NOTES = ("args.yaml", "inputs.json", "dataset.json", "tracker.json", "summary.json", "events.jsonl", "curves.png")
NOTES += ("report.html",)
CLASSIFIER = "classifier"  # a reward model
CARD, SEAL = "README.md", "<!-- written by a run of Plainloop; one that was edited stays as it is: {} -->\n"
GATHERED = ".export.weights.tmp"  # the weights of sharded processes, on their way to the final model
READERS = 8  # threads that hash the files of a checkpoint
_LOCKS: dict[Path, TextIO] = {}  # that this process holds, kept open: to close any handle of a file lets go of its lock


def checkpoints(output_dir: str) -> list[Path]:
    """The checkpoint folders, oldest first."""
    found = [p for p in Path(output_dir).glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=step_of)


def newest_intact(output_dir: str) -> Path | None:
    """The newest checkpoint that verifies; those passed over are named."""
    for checkpoint in reversed(checkpoints(output_dir)):
        if (problem := find_damage(checkpoint)) is None:
            return checkpoint
        say(f"{checkpoint} is passed over: {problem}")
    return None


def find_damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; None if each file has the size and hash of the manifest."""
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
    """The arguments of the run that a folder holds. None: it holds none; {}: they cannot be read."""
    # A run that ended before it wrote a metric or a checkpoint has left nothing worth keeping.
    begun = any(Path(folder, name).exists() for name in ("metrics.jsonl", "summary.json")) or checkpoints(str(folder))
    return _read_args(Path(folder)) if begun else None


def claim_output_dir(arguments: CommonArgs, saved_args: dict[str, Any] | None, processes: int | None = None) -> Path | None:
    """Decide what this run does with its output folder; returns the checkpoint to go on from.

    saved_args: see earlier_args; processes: of this run. Raises UserError where going on would
    mix two runs, SystemExit(0) where the same run is already complete. Deletes nothing.
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
    """What sends the model of a finished run to the Hub."""
    private = " --hub_private_repo" if args.hub_private_repo else ""
    return f"python -m tools.push {shlex.quote(args.output_dir)} --hub_model_id {args.hub_model_id}{private}"


def refuse_what_is_not_ours(arguments: CommonArgs, saved_args: dict[str, Any] | None, script: str = "") -> None:
    """Raise UserError where this run would write over what it starts from, or over what no run has left.

    saved_args: see earlier_args. script: a copy of which is left.
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
    # With args.yaml, a run was begun here, which has left nothing that is worth keeping, and no model.
    patterns = WEIGHTS if _read_args(folder) else ours
    found = [file for pattern in patterns for file in sorted(folder.glob(pattern)) if file.is_file()]
    if script and patterns is ours and (copy := folder / Path(script).name).exists() and not copy.samefile(script):
        found.append(copy)
    if found:
        raise UserError(f"--output_dir {folder} holds {found[0].name}, which no run has left there: choose another")


def lock(accelerator: Accelerator, output_dir: Path) -> None:
    """Hold the folder for as long as this run lives. Called on every process. Raises UserError where another run holds it.

    A record lock (POSIX) of the main process on `.lock`: the kernel, or the server of a shared disk, lets go of it when the
    process ends, however it does. Where a disk knows no locks, that is said, and nothing is held.
    """
    problem = [_lock(output_dir) if accelerator.is_main_process else None]
    if (problem := broadcast_object_list(problem)[0]) is not None:
        raise UserError(problem)


def _lock(output_dir: Path) -> str | None:
    """What the user is told if this process cannot have it; else None."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    path = output_dir.resolve() / ".lock"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        if not is_held(output_dir):  # of a folder that is no longer there
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
    """Whether the lock that this process has taken is that of the folder as it is now: it may have been deleted, and be
    another run's. True where none was taken."""
    path = output_dir.resolve() / ".lock"
    if path not in _LOCKS:
        return True
    try:
        return os.path.samestat(os.fstat(_LOCKS[path].fileno()), path.stat())
    except OSError:
        return False


def is_over(output_dir: Path) -> bool:
    """Whether the run that had the folder last has ended, whatever it says: its lock is free, and was taken on this machine.
    Another machine's lock is not always seen here."""
    path = output_dir.resolve() / ".lock"
    if path in _LOCKS:  # to close another handle of it would let go of it
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
    """Delete what a run has left in its folder, and nothing else that may lie there."""
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
    """Flush every file to the disk and list it in manifest.json.

    known: size and hash of those that other processes have flushed. Raises OSError where one of them is not here.
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
    """What a run cannot do without is written here. Raises UserError where the disk does not take it."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{output_dir} cannot be written ({error}): make room; the same command goes on from the last checkpoint"
        ) from None


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    os.replace(temporary, path)


def seal(text: str) -> str:
    """A text that ends with a mark by which `is_sealed` knows it again."""
    text = text.rstrip() + "\n\n"
    return text + SEAL.format(hashlib.sha256(text.encode()).hexdigest()[:16])


def is_sealed(path: Path) -> bool:
    """Whether a file is as a run has left it: not the user's, and not edited."""
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
    """Raise UserError where the arguments make another run than those before; say the others that have changed.

    allowed: what may change (see args.may_change).
    checkpoint: the one to go on from; None: there is none, and nothing is said. before: {} where it is not known.
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
    """A flag that takes several values now may have taken one when a run was begun."""
    return [before] if isinstance(now, list) and before is not None and not isinstance(before, list) else before


def _shown(args: dict[str, Any], before: dict[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name} {before.get(name)} -> {args[name]}" for name in names)


def _read_args(folder: Path) -> dict[str, Any]:
    """args.yaml of a run or a checkpoint; {} where it is missing or unreadable."""
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
    """The step at which a complete run has ended; 0 where that cannot be read."""
    try:
        return float(json.loads(Path(output_dir, "summary.json").read_text(encoding="utf-8"))["final"]["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
