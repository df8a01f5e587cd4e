"""LoRA: a frozen model with small trained adapters (Hu et al. 2021, arXiv 2106.09685), by peft."""

from pathlib import Path
from types import ModuleType

from common.args import CommonArgs
from common.errors import UserError
from common.model.flat_model import FlatModel


def add_lora(args: CommonArgs, model: FlatModel, checkpoint: str | Path | None = None) -> FlatModel:
    """Freeze the model and put LoRA adapters on it: new ones, or those of a checkpoint.

    Raises UserError without peft, for layers that do not exist, or where the model is itself an adapter: one that stands
    on another could not be loaded again.
    """
    peft = import_peft("--use_peft")
    base = model.lm.config._name_or_path
    if Path(base, "adapter_config.json").exists():
        raise UserError(f"--use_peft: {base} is an adapter itself; train it with --merge_lora to build on it")
    if checkpoint is not None:
        return FlatModel(peft.PeftModel.from_pretrained(model.lm, checkpoint, is_trainable=True), padded=model.padded)
    config = peft.LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=args.lora_target_modules or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        return FlatModel(peft.get_peft_model(model.lm, config), padded=model.padded)
    except ValueError as error:
        raise UserError(f"--lora_target_modules: {error}") from None


def import_peft(needed_for: str) -> ModuleType:
    try:
        import peft
    except ImportError:
        raise UserError(f"{needed_for} needs peft: pip install peft") from None
    return peft
