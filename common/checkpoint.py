"""Checkpoints and the output folder: whole or not there, verified before use, and loadable with from_pretrained.

A checkpoint is a folder `checkpoint-<step>` with the model and tokenizer as transformers saves them, the optimizer, and
`trainer_state.json`. It is written under another name, flushed to the disk, listed in `manifest.json` with sizes and
hashes, and only then renamed; older ones are deleted after that. A kill at any moment leaves the last whole one usable.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from common.errors import UserError, say

import torch
from accelerate.utils import DistributedType

# Arguments that a resumed run may have other than the one it goes on with: they change what is written, not what is
# learned.
MAY_CHANGE = {"overwrite_output_dir", "resume_from_checkpoint", "save_total_limit", "report_to", "run_name", "num_samples"}
MAY_CHANGE |= {"dataset_cache_dir", "dataset_num_proc", "dry_run"}
LINES = ("metrics.jsonl", "samples.jsonl", "completions.jsonl")  # one object per line, each with its step
SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)


def save_checkpoint(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    tokenizer: Any,
    output_dir: str,
    step: int,
    state: dict[str, Any],
    total_limit: int,
) -> None:
    """Write checkpoint-<step> and prune to total_limit. Called on every process; step: updates done so far."""
    final, temporary = Path(output_dir, f"checkpoint-{step}"), Path(output_dir, f".checkpoint-{step}.tmp")
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    save_model(accelerator, model, tokenizer, temporary)
    if accelerator.distributed_type in SHARDED:
        accelerator.save_state(str(temporary / "state"))
    elif accelerator.is_main_process:
        torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (temporary / "trainer_state.json").write_text(json.dumps({"step": step, **state}))
        _seal(temporary)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
        _flush(final.parent)
        for old in checkpoints(output_dir)[:-total_limit] if total_limit > 0 else []:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def save_model(accelerator: Any, model: Any, tokenizer: Any, folder: Path) -> None:
    """Model (or LoRA adapter) and tokenizer as from_pretrained reads them. Called on every process."""
    lm = accelerator.unwrap_model(model, keep_torch_compile=False).lm
    weights = None
    if accelerator.distributed_type in SHARDED:
        weights = {name.removeprefix("lm."): w for name, w in accelerator.get_state_dict(model).items()}
    if accelerator.is_main_process:
        lm.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)


def export(accelerator: Any, model: Any, tokenizer: Any, output_dir: str, merge_lora: bool = False) -> None:
    """The final model directly in output_dir; merge_lora: with its adapters merged in, at the end of the run."""
    wrapper = accelerator.unwrap_model(model)
    if merge_lora and hasattr(wrapper.lm, "merge_and_unload"):
        wrapper.lm = wrapper.lm.merge_and_unload()
    temporary = Path(output_dir, ".export.tmp")
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    save_model(accelerator, model, tokenizer, temporary)
    if accelerator.is_main_process:
        for file in temporary.iterdir():
            _flush(file)
            os.replace(file, Path(output_dir, file.name))
        temporary.rmdir()
    accelerator.wait_for_everyone()


def resume(accelerator: Any, checkpoint: Path | None, optimizer: Any) -> dict[str, Any]:
    """Bring back the optimizer; returns trainer_state.json ({"step": 0} without a checkpoint).

    The weights are not loaded here: the model was created from the checkpoint's folder.
    """
    if checkpoint is None:
        return {"step": 0}
    if accelerator.distributed_type in SHARDED:
        accelerator.load_state(str(checkpoint / "state"))
    else:
        optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True))
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    say(f"resuming from {checkpoint} at step {state['step']}")
    return state


def checkpoints(output_dir: str) -> list[Path]:
    """The checkpoint folders, oldest first."""
    found = [p for p in Path(output_dir).glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("checkpoint-")))


def newest_whole(output_dir: str) -> Path | None:
    """The newest checkpoint that verifies; those passed over are named."""
    for checkpoint in reversed(checkpoints(output_dir)):
        if (problem := defect(checkpoint)) is None:
            return checkpoint
        say(f"{checkpoint} is passed over: {problem}")
    return None


def defect(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; None if each file has the size and hash of the manifest."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        for name, (size, digest) in files.items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size or _hash(path) != digest:
                return f"{name} is damaged"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json cannot be read ({type(error).__name__})"
    return None


def claim_output_dir(args: dict[str, Any], saved_args: dict[str, Any] | None) -> Path | None:
    """Decide what this run does with its output folder; returns the checkpoint to go on from.

    args: this run's arguments; saved_args: those of the run that the folder holds, if any. Raises UserError where going on
    would mix two runs, SystemExit(0) where the same run is already complete. Deletes nothing.
    """
    output_dir, wish = args["output_dir"], args["resume_from_checkpoint"]
    model = Path(args["model_name_or_path"] or "").resolve()
    if args["model_name_or_path"] and model.is_relative_to(Path(output_dir).resolve()):
        raise UserError(f"--output_dir {output_dir} holds the model to start from: choose another")
    if wish not in ("auto", "none"):
        if (problem := defect(Path(wish))) is not None:
            raise UserError(f"--resume_from_checkpoint {wish}: {problem}")
        return Path(wish)
    if args["overwrite_output_dir"] or saved_args is None:
        return None
    changed = [name for name in args if name not in MAY_CHANGE and args[name] != saved_args.get(name)]
    again = "--overwrite_output_dir starts over, or choose another --output_dir"
    if changed:
        shown = ", ".join(f"{name} {saved_args.get(name)} -> {args[name]}" for name in changed[:3])
        raise UserError(f"{output_dir} holds another run ({shown}): {again}")
    if wish == "none":
        raise UserError(f"{output_dir} holds an earlier run: {again}")
    if Path(output_dir, "summary.json").exists():
        say(f"{output_dir} holds this very run, complete: {again}")
        raise SystemExit(0)
    return newest_whole(output_dir)


def delete_run(output_dir: Path) -> None:
    """Delete what a run has left in its folder, and nothing else that may lie there."""
    for folder in [*checkpoints(str(output_dir)), *output_dir.glob(".*.tmp")]:
        shutil.rmtree(folder)
    for pattern in (*LINES, "summary.json", "curves.png", "args.yaml", "model*.safetensors*", "adapter_*"):
        for file in output_dir.glob(pattern):
            file.unlink()


def _seal(folder: Path) -> None:
    """Flush every file to the disk and list it in manifest.json."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        _flush(path)
        files[str(path.relative_to(folder))] = (path.stat().st_size, _hash(path))
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({"files": files}, indent=1))
    _flush(manifest)
    for path in [p for p in folder.rglob("*") if p.is_dir()] + [folder]:
        _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
