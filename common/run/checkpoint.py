"""Checkpoints: written atomically, resumable, and loadable with from_pretrained.

A checkpoint is a folder `checkpoint-<step>` with the model and tokenizer as transformers saves them, the
optimizer, the run's settings, and `trainer_state.json`. (FSDP2 keeps the optimizer, and if asked the weights,
in shards: sharded.py. DeepSpeed keeps its engine's state in `state/`.) It is written under a temporary name
by all processes, flushed to disk, listed in `manifest.json` with sizes and hashes, and only then renamed;
older checkpoints are deleted after that. A kill at any moment, or a full disk, leaves the last complete one
usable.
"""

from collections.abc import Callable, Iterator
import contextlib
import hashlib
import json
import os
from pathlib import Path
import shutil
from types import NoneType
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from common.args import CommonArgs, save_args
from common.data.types import Tokenizer
from common.errors import UserError, quoted, say
from common.files import flush, flush_all, write_manifest, writing
from common.model.flat_model import FlatModel
from common.model.merge import write_merged
from common.model.save import EXTRA, SHARDS, copy_model, gather_weights, write_model
from common.processes import gather_lists, on_each_process, on_main_process, sharded_as, unsharded
from common.run import sharded
from common.run.folder import WEIGHTS, checkpoint_at, checkpoints, matching, read_object, step_of
from safetensors.torch import load_file
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

# Of the optimizer's groups: set by flags or by the script, not by a checkpoint.
SETTINGS = ("lr", "lr_multiplier", "weight_decay", "betas", "eps", "fused")
KEPT = "kept.pt"  # what a script keeps by `Run.keep`


def save_checkpoint(
    args: CommonArgs,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokenizer: Tokenizer,
    step: int,
    state: dict[str, Any],
    best: int | None,
    kept: dict[str, Any] | None = None,
) -> bool:
    """Write checkpoint-<step>, then prune to the newest args.save_total_limit and that of step `best`.
    Returns whether it is there. kept: see Run.keep.

    Called on every process; step: updates done so far. If the disk refuses the write, a message says so and
    training continues: existing checkpoints stay, and the next save tries again.
    """
    output_dir = Path(args.output_dir)
    final = checkpoint_at(args.output_dir, step)
    temporary = output_dir / f".checkpoint-{step}.tmp"
    wrapper = accelerator.unwrap_model(model, keep_torch_compile=False)
    kind = accelerator.distributed_type
    is_fsdp = kind == DistributedType.FSDP
    shards = is_fsdp and sharded.writes_shards(accelerator, wrapper)
    weights = sharded.gather_extra(wrapper) if shards else gather_weights(accelerator, model)
    states = {}
    for name, value in (kept or {}).items():
        states[name] = kept_state(accelerator, name, value)

    @writing(output_dir)
    def write() -> None:
        for folder in output_dir.glob(".checkpoint-*.tmp"):  # left by a save that was killed
            shutil.rmtree(folder, ignore_errors=True)
        temporary.mkdir(parents=True)
        write_model(temporary, wrapper, weights, tokenizer)
        if shards:  # beside them lie the configuration, the tokenizer, and `model.extra`, whole
            for file in matching(temporary, ["model*.safetensors*"]):
                file.unlink()
        if kind not in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
        if states:
            torch.save(states, temporary / KEPT)

    @writing(output_dir)
    def write_shares() -> None:
        if is_fsdp:
            sharded.save(accelerator, wrapper, optimizer, temporary)
        elif kind == DistributedType.DEEPSPEED:
            accelerator.save_state(str(temporary / "state"))

    @writing(output_dir)
    def complete() -> None:
        (temporary / "trainer_state.json").write_text(json.dumps({"step": step, **state}))
        save_args(args, temporary / "args.yaml")
        if (output_dir / "inputs.json").exists():  # not if somebody has deleted it since the start
            shutil.copyfile(output_dir / "inputs.json", temporary / "inputs.json")
        write_manifest(temporary)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
        flush(output_dir)

    try:
        on_main_process(accelerator, write)
        on_each_process(accelerator, write_shares)
        on_main_process(accelerator, complete)
    except UserError as error:
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
        say(f"{final} could not be written, training goes on, and the next save tries again: {error}")
        return False
    if accelerator.is_main_process:
        prune(args.output_dir, step, args.save_total_limit, best)
    accelerator.wait_for_everyone()
    return True


def export(
    args: CommonArgs,
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: Tokenizer,
    best: Path | None = None,
    dtype: str | None = None,
    also: Callable[[], None] | None = None,
) -> None:
    """Write the final model to args.output_dir: that of the checkpoint `best`, or the current one. Called on
    every process.

    With --merge_lora the adapter is merged into its base, which is loaded again, unquantised. dtype: of the
    weights; None: as they are. also: writes further files of that model, on the main process. Raises
    UserError if the disk refuses the write. Weights may change: this ends the run.
    """
    output_dir = Path(args.output_dir)
    temporary = output_dir / ".export.tmp"
    wrapper = accelerator.unwrap_model(model, keep_torch_compile=False)
    trust = {"trust_remote_code": args.trust_remote_code}
    in_shards = best is not None and (best / SHARDS).is_dir()
    if in_shards:
        sharded.load(accelerator, wrapper, None, best)
    is_copied = best is not None and not in_shards
    weights = {} if is_copied else gather_weights(accelerator, model)

    @writing(output_dir)
    def write() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        folder = temporary / "adapter" if args.merge_lora else temporary
        folder.mkdir(parents=True)
        if is_copied:
            copy_model(best, folder, dtype, **trust)
            tokenizer.save_pretrained(folder)
        else:
            write_model(folder, wrapper, weights, tokenizer, dtype)
        if args.merge_lora:
            write_merged(folder, temporary, **trust)
            shutil.rmtree(folder)
        if best and (best / EXTRA).exists():
            shutil.copyfile(best / EXTRA, temporary / EXTRA)
        flush_all(temporary)
        names = os.listdir(temporary)
        for name in names:
            target = output_dir / name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(temporary / name, target)
        for file in matching(output_dir, WEIGHTS):
            if file.name not in names:  # left by an earlier export in another format
                file.unlink()
        if also is not None:
            also()

    try:
        on_main_process(accelerator, write)
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
    if best is not None:
        say(f"the final model is that of {best}, the best one")


def check_modules(model: FlatModel, optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError for modules that would be trained and not saved, or neither trained nor frozen."""
    trained = set()
    for group in optimizer.param_groups:
        trained.update(map(id, group["params"]))
    for name, p in model.named_parameters():
        if not name.startswith(("lm.", "extra.")):
            raise UserError(
                f"model.{name} would never be saved: modules of your own go into model.extra, before make_optimizer"
            )
        if p.requires_grad and id(p) not in trained:
            raise UserError(
                f"model.{name} is not in the optimizer: add modules to model.extra before make_optimizer, and freeze what "
                "is not to be trained"
            )


def resume(
    accelerator: Accelerator,
    checkpoint: Path | None,
    optimizer: torch.optim.Optimizer,
    model: nn.Module | None = None,
) -> dict[str, Any]:
    """Restore the optimizer; returns trainer_state.json ({"step": 0} without a checkpoint).

    Weights are loaded here only if they are in shards: otherwise the model was already created from the
    checkpoint's folder.
    """
    if checkpoint is None:
        return {"step": 0}
    settings = []
    for group in optimizer.param_groups:
        settings.append({name: group[name] for name in SETTINGS if name in group})
    if accelerator.distributed_type == DistributedType.FSDP:
        wrapper = accelerator.unwrap_model(model, keep_torch_compile=False)
        sharded.load(accelerator, wrapper, optimizer, checkpoint)
    elif accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.load_state(str(checkpoint / "state"))
    else:
        file = checkpoint / "optimizer.pt"
        with _reading(file, "the optimizer state of this model, as tensors only"):
            optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)  # this run's: the weight decay may have changed
    state = read_object(checkpoint / "trainer_state.json")
    say(f"resuming from {checkpoint} at step {state['step']}")
    return state


def load_extra(model: FlatModel, checkpoint: Path | None, start: str | None) -> None:
    """Load the script's own modules in `model.extra`, before Accelerate prepares the model: from a
    checkpoint, or, at the start of a run, from the folder of its model, if an earlier stage had the same
    ones."""
    if checkpoint is None and start and Path(start, EXTRA).exists():
        weights = load_file(Path(start, EXTRA))
        if shapes_of(weights) == shapes_of(model.extra.state_dict()):
            model.extra.load_state_dict(weights)
            say(f"{Path(start, EXTRA)}: training goes on with these modules")
        else:
            say(f"{Path(start, EXTRA)}: left out, this script has other modules")
    if checkpoint is None or not len(model.extra):
        return
    with _reading(checkpoint / EXTRA, f"the modules {', '.join(model.extra)} of this script"):
        model.extra.load_state_dict(load_file(checkpoint / EXTRA))


def shapes_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: w.shape for name, w in weights.items()}


def kept_state(accelerator: Accelerator, name: str, kept: Any) -> Any:
    """The state of what a script keeps: a dict, or an object with a `state_dict()`. Called on every process.

    Raises UserError for values that could not be read again, and if it differs between the processes: only
    the main process's would be restored.
    """
    state = tree_map(unsharded, kept if isinstance(kept, dict) else kept.state_dict())
    seen = []
    for value in tree_leaves(state):
        if isinstance(value, torch.Tensor):
            bits = value.detach().cpu().reshape(-1).view(torch.uint8)
            seen.append(f"{tuple(value.shape)} {hashlib.sha256(bits.numpy()).hexdigest()}")
        elif type(value) in (bool, int, float, str, NoneType):
            seen.append(repr(value))
        else:
            kind = f"{type(value).__module__}.{type(value).__name__}"
            raise UserError(
                f"run.keep: the state of {name!r} holds a {kind}; expected numbers, texts and tensors"
            )
    everyones = gather_lists(accelerator, [seen])
    if any(other != everyones[0] for other in everyones):
        raise UserError(f"run.keep: the state of {name!r} differs between the processes, and is not saved")
    return state


def load_kept(name: str, kept: Any, checkpoint: Path) -> None:
    """Restore an object from what `save_checkpoint` kept of it."""
    with _reading(checkpoint / KEPT, f"what this script keeps as {name!r}"):
        state = torch.load(checkpoint / KEPT, map_location="cpu", weights_only=True)[name]
        if isinstance(kept, dict):
            state = sharded_as(kept, state)
            kept.clear()
            kept.update(state)
        else:
            kept.load_state_dict(sharded_as(kept.state_dict(), state))


@contextlib.contextmanager
def _reading(file: Path, what: str) -> Iterator[None]:
    """Turn any exception into one line: a file that is missing, damaged or of another kind fails in many
    ways."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{file} does not hold {what}: {quoted(error, 300, str)}") from None


def prune(output_dir: str, step: int, total_limit: int, best: int | None) -> None:
    """Keep the newest total_limit (0: all) checkpoints and the best one, once checkpoint-<step> is
    complete."""
    # Checkpoints beyond this step are damaged, or were abandoned when the run resumed from before them.
    # Counted, they would push out the new one.
    usable = [path for path in checkpoints(output_dir) if step_of(path) <= step]
    newest = usable[-total_limit:]  # all for 0
    for path in checkpoints(output_dir):
        if path not in newest and step_of(path) != best:
            shutil.rmtree(path, ignore_errors=True)
