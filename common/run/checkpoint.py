"""Checkpoints: written atomically, resumable, and loadable with from_pretrained.

A checkpoint is a folder `checkpoint-<step>` with the model and tokenizer as transformers saves them, the optimizer, the
run's `args.yaml`, and `trainer_state.json`; with --sharded_checkpoints weights and optimizer are in shards (sharded.py). It
is written under a temporary name, flushed to disk, listed in `manifest.json` with sizes and hashes, and only then renamed;
older checkpoints are deleted after that. A kill at any moment, or a full disk, leaves the last complete one usable.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common.args import CommonArgs
from common.data.types import Tokenizer
from common.errors import UserError, is_of_the_disk, say
from common.files import find_damage, flush, write_manifest
from common.memory import SHARDED
from common.model.flat_model import FlatModel, gathered
from common.model.merge import write_merged
from common.model.quantised import is_quantised
from common.model.save import EXTRA, model_writer
from common.model.shards import FOLDER, holds_shards
from common.processes import on_main_process
from common.run.best import Best
from common.run.consolidate import GATHERED, consolidate, final_writer, frame_writer, model_copier
from common.run.export_dtype import cast_weights
from common.run.folder import WEIGHTS, checkpoints, copy_settings, read_json, step_of
from common.run.sharded import load_shards, save_shards

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn


def save_checkpoint(
    args: CommonArgs,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokenizer: Tokenizer,
    step: int,
    state: dict[str, Any],
    best: Best,
) -> bool:
    """Write checkpoint-<step>, then prune to the newest args.save_total_limit and the best one. Returns whether it was
    written.

    Called on every process; step: updates done so far. If the disk refuses the write, a message says so and training
    continues: existing checkpoints stay, and the next save tries again.
    """
    output_dir = args.output_dir
    final, temporary = Path(output_dir, f"checkpoint-{step}"), Path(output_dir, f".checkpoint-{step}.tmp")
    sharded, shards = accelerator.distributed_type in SHARDED, args.sharded_checkpoints
    wrapper = accelerator.unwrap_model(model, keep_torch_compile=False)
    write_model = (frame_writer if shards else model_writer)(accelerator, model, tokenizer)

    def write() -> None:
        for left in Path(output_dir).glob(".checkpoint-*.tmp"):  # left by a save that was killed
            shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir(parents=True)
        write_model(temporary)
        if not sharded and not shards:
            torch.save(optimizer.state_dict(), temporary / "optimizer.pt")

    def complete() -> None:
        known = {"step": step, "processes": accelerator.num_processes, **state}
        (temporary / "trainer_state.json").write_text(json.dumps(known))
        copy_settings(Path(output_dir), temporary)
        write_manifest(temporary)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
        flush(final.parent)

    problem = _attempt(accelerator, write)
    if shards and not problem:
        problem = _attempt(accelerator, lambda: save_shards(wrapper, optimizer, temporary), everyone=True)
    elif sharded and not problem:
        problem = _attempt(accelerator, lambda: accelerator.save_state(str(temporary / "state")), everyone=True)
    problem = problem or _attempt(accelerator, complete)
    if problem:
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
        best.withdraw(step)
        say(f"{final} could not be written ({problem}): training goes on, and the next save tries again")
        return False
    if accelerator.is_main_process:
        prune(output_dir, step, args.save_total_limit, best.step)
    accelerator.wait_for_everyone()
    return True


def export(
    args: CommonArgs,
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: Tokenizer,
    best: Path | None = None,
    dtype: str = "float32",
    also: Callable[[], None] | None = None,
) -> None:
    """Write the final model to args.output_dir, its weights in dtype: that of the checkpoint `best`, or the current one.
    also: writes further files of that model, on the main process.

    With --merge_lora the adapters are merged into the model, so this ends the run; a quantised base is loaded again
    unquantised for that. Raises UserError if the disk refuses the write.
    """
    output_dir = args.output_dir
    wrapper, temporary = accelerator.unwrap_model(model), Path(output_dir, ".export.tmp")
    if best is not None and (problem := on_main_process(accelerator, lambda: find_damage(best))) is not None:
        say(f"{best} cannot be exported ({problem}): the final model is that of the last step")
        best = None
    if args.merge_lora and is_quantised(wrapper):
        write_model = _merger_into_the_base(
            args, model_copier(best) if best else model_writer(accelerator, model, tokenizer)
        )
    elif args.merge_lora and hasattr(wrapper.lm, "merge_and_unload"):
        merged = _merge_adapter(accelerator, wrapper, best)
        write_model = final_writer(args, accelerator, model, tokenizer, merged)
    elif best is not None and holds_shards(best):
        write_model = partial(consolidate, best, trust_remote_code=args.trust_remote_code)
    else:
        write_model = model_copier(best) if best else final_writer(args, accelerator, model, tokenizer)

    def write() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write_model(temporary)
        cast_weights(temporary, dtype, wrapper)
        if best and (best / EXTRA).exists():  # belongs to the merged adapter of `best`
            shutil.copy(best / EXTRA, temporary)
        files = list(temporary.iterdir())
        for file in files:
            flush(file)
        for file in files:
            target = Path(output_dir, file.name)
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(file, target)
        for old in {old for pattern in WEIGHTS for old in Path(output_dir).glob(pattern)}:
            if old.name not in {file.name for file in files}:  # left by an earlier export in another format
                old.unlink()
        temporary.rmdir()
        if also is not None:
            also()

    problem = _attempt(accelerator, write)
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        Path(output_dir, GATHERED).unlink(missing_ok=True)
    if problem:
        saved = checkpoints(output_dir)
        again = f"the same command goes on from {saved[-1].name}" if saved else "no checkpoint was kept (--save_steps)"
        raise UserError(f"the final model could not be written to {output_dir} ({problem}): make room; {again}")
    if best is not None:
        say(f"the final model is that of {best}, the best one")


def resume(
    accelerator: Accelerator, checkpoint: Path | None, optimizer: torch.optim.Optimizer, model: nn.Module | None = None
) -> dict[str, Any]:
    """Restore the optimizer; returns trainer_state.json ({"step": 0} without a checkpoint).

    Weights are loaded here only if they are sharded: otherwise the model was already created from the checkpoint's folder.
    No code from the files is executed.
    """
    if checkpoint is None:
        return {"step": 0}
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    if (checkpoint / FOLDER).is_dir():
        load_shards(accelerator.unwrap_model(model, keep_torch_compile=False), optimizer, checkpoint)
    elif accelerator.distributed_type in SHARDED:
        accelerator.load_state(str(checkpoint / "state"))
    else:
        file = checkpoint / "optimizer.pt"
        try:
            optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        except Exception as error:  # a state that does not match this model fails in many ways
            reason = str(error).strip().split("\n")[0]
            raise UserError(f"{file} is not the optimizer of this model, or holds more than tensors: {reason}") from None
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)  # this run's settings: the weight decay may have changed
    state = read_json(checkpoint / "trainer_state.json")
    say(f"resuming from {checkpoint} at step {state['step']}")
    return state


def load_extra(model: FlatModel, checkpoint: Path | None) -> None:
    """Load the script's own modules in `model.extra`, before Accelerate prepares the model."""
    if checkpoint is None or not len(model.extra) or holds_shards(checkpoint):
        return
    file = checkpoint / EXTRA
    try:
        model.extra.load_state_dict(load_file(file))
    except Exception as error:  # missing, damaged, or for other modules
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{file} does not hold the modules {', '.join(model.extra)} of this script: {reason}") from None


def prune(output_dir: str, step: int, total_limit: int, best: int | None) -> None:
    """Keep the newest total_limit (0: all) checkpoints and the best one, once checkpoint-<step> is complete."""
    found = checkpoints(output_dir)
    # Checkpoints beyond this step are damaged, or were abandoned when the run resumed from before them. Counted, they would
    # push out the new one.
    surplus = [path for path in found if step_of(path) > step]
    if total_limit > 0:
        surplus += [path for path in found if step_of(path) <= step][:-total_limit]
    for path in surplus:
        if step_of(path) != best:
            shutil.rmtree(path, ignore_errors=True)


def _merge_adapter(accelerator: Accelerator, wrapper: FlatModel, best: Path | None) -> dict[str, torch.Tensor] | None:
    """Merge the LoRA adapter (of the checkpoint `best`, or the current one) into the model permanently.

    Returns the merged weights by name ({} except on the main process) if DeepSpeed's ZeRO-3 shards them again afterwards.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    zero3 = any(hasattr(parameter, "ds_id") for parameter in wrapper.parameters())
    with gathered(wrapper) if zero3 else contextlib.nullcontext():
        if best is not None:
            # Read by one process: another machine may not share its disk. (safetensors does not know "cpu:0".)
            adapter = on_main_process(accelerator, lambda: load_peft_weights(str(best), device="cpu"))
            placed = {name: weight.to(accelerator.device) for name, weight in adapter.items()}
            set_peft_model_state_dict(wrapper.lm, placed)
        wrapper.lm = wrapper.lm.merge_and_unload()
        if not zero3:
            return None
        weights = wrapper.state_dict() if accelerator.is_main_process else {}
        return {name: weight.cpu().clone() for name, weight in weights.items()}


def _merger_into_the_base(args: CommonArgs, write_adapter: Callable[[Path], None]) -> Callable[[Path], None]:
    """A function that writes the merged model in the dtype of its base, which this run had quantised."""

    def write(folder: Path) -> None:
        adapter = folder / "adapter"
        adapter.mkdir()
        write_adapter(adapter)
        write_merged(adapter, folder, trust_remote_code=args.trust_remote_code)
        shutil.rmtree(adapter)

    return write


def _attempt(accelerator: Accelerator, write: Callable[[], None], everyone: bool = False) -> str | None:
    """Call `write` on the main process (or everyone). Returns the disk's error on all processes, or None."""
    problem = None
    if everyone or accelerator.is_main_process:
        try:
            write()
        except Exception as error:  # safetensors, tokenizers and torch raise their own classes for a full disk
            if not is_of_the_disk(error):
                raise
            problem = " ".join(str(error).split())
            problem = re.sub(r"\[enforce fail.*", "torch could not write: is the disk full?", problem)
    failures = accelerator.reduce(torch.tensor(float(problem is not None), device=accelerator.device), "sum")
    return (problem or "on another process") if failures else None
