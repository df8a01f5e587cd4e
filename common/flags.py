"""Hints about flags: other tools' names for them, and flags without effect unless another one is set."""

import dataclasses
from typing import Any

from common.args import CommonArgs, first_definition

# Flags of transformers and TRL that do not exist here, and their replacements.
_PRECISION = "the precision is Accelerate's: accelerate launch --mixed_precision bf16 (or fp16), or accelerate config"
_MASK = "only what the assistant says is trained, unless --train_on everything asks for more"
_DEVICES = "how many processes, and on what, is Accelerate's: accelerate launch --num_processes N, or accelerate config"
ELSEWHERE = {
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "mixed_precision": _PRECISION,
    "torch_dtype": "--dtype, of the weights",
    "attn_implementation": "it is chosen when the model is loaded, and --dry_run says which",
    "assistant_only_loss": _MASK,
    "completion_only_loss": _MASK,
    "max_seq_length": "--max_length",
    "warmup_ratio": "--warmup_steps, where a value below 1 is a share of the run",
    "eval_strategy": "--eval_steps; 0: never",
    "save_strategy": "--save_steps; 0: only the final model",
    "logging_strategy": "--logging_steps",
    "deepspeed": "accelerate launch --config_file accelerate_configs/deepspeed_zero2.yaml",
    "fsdp": "accelerate launch --config_file accelerate_configs/fsdp2.yaml",
    "use_vllm": "--rollout_server of train_grpo.py: a vLLM server that samples (docs/rollouts.md)",
    "do_train": "to start the script is to train",
    "do_eval": "--eval_steps; 0: never",
    "num_gpus": _DEVICES,
    "gpus": _DEVICES,
    "num_processes": _DEVICES,
    "device": _DEVICES,
    "no_cuda": _DEVICES,
    "use_cpu": _DEVICES,
    "num_workers": "there are no workers that load: the data lies tokenised on the disk (--dataset_num_proc: who tokenises)",
    "dataloader_num_workers": "there are none: the data lies tokenised on the disk (--dataset_num_proc: who tokenises)",
    "resume": "the same command goes on where the run stopped",
    "load_best_model_at_end": "--save_best eval_loss, or another metric of the evaluations",
    "metric_for_best_model": "--save_best eval_loss, or another metric of the evaluations",
    "ref_model": "the reference is the model at the start: --model_name_or_path",
    "ref_model_name_or_path": "the reference is the model at the start: --model_name_or_path",
}
# Other tools' names of flags; of several flags, the first one that the script has.
ALIASES = {
    "lr": ["learning_rate"],
    "epochs": ["num_train_epochs"],
    "num_epochs": ["num_train_epochs"],
    "steps": ["max_steps"],
    "batch_size": ["per_device_train_batch_size"],
    "train_batch_size": ["per_device_train_batch_size"],
    "eval_batch_size": ["per_device_eval_batch_size"],
    "grad_accum": ["gradient_accumulation_steps"],
    "gradient_clipping": ["max_grad_norm"],
    "grad_clip": ["max_grad_norm"],
    "clip_grad_norm": ["max_grad_norm"],
    "scheduler": ["lr_scheduler_type"],
    "warmup": ["warmup_steps"],
    "model": ["model_name_or_path"],
    "model_name": ["model_name_or_path"],
    "tokenizer": ["tokenizer_name"],
    "data": ["dataset_name"],
    "train_file": ["dataset_name"],
    "dataset_path": ["dataset_name"],
    "validation_file": ["eval_dataset_name"],
    "out": ["output_dir"],
    "output": ["output_dir"],
    "max_tokens": ["max_completion_length", "max_length"],
    "seq_len": ["max_length"],
    "block_size": ["max_length"],
    "max_new_tokens": ["max_completion_length", "eval_max_new_tokens"],
    "lora": ["use_peft"],
    "use_lora": ["use_peft"],
    "peft": ["use_peft"],
    "qlora": ["load_in_4bit"],
    "use_qlora": ["load_in_4bit"],
    "lora_rank": ["lora_r"],
    "bnb_4bit": ["load_in_4bit"],
    "kl_coef": ["beta"],
    "kl_coeff": ["beta"],
    "cliprange": ["epsilon"],
    "clip_range": ["epsilon"],
    "group_size": ["num_generations"],
    "num_samples_per_prompt": ["num_generations"],
    "num_return_sequences": ["num_generations"],
}


def without_effect(values: dict[str, Any], args_class: type[CommonArgs]) -> list[str]:
    """A line for each argument that differs from its default but has no effect beside the others (see needs of `arg`)."""
    lines = []
    for f in dataclasses.fields(args_class):
        default = f.default_factory() if f.default is dataclasses.MISSING else f.default
        needs = first_definition(args_class, f.name)[1].metadata.get("needs")
        if not needs or values[f.name] == default:
            continue
        missing = next((need for need in needs.split(", ") if not _is_met(need, values)), None)
        if missing:
            words = values[f.name] if isinstance(values[f.name], list) else [values[f.name]]
            given = " ".join([f"--{f.name}", *(str(word) for word in words if word is not True)])
            other = f"with --{missing[3:]}" if missing.startswith("no ") else f"without --{missing.replace('=', ' ')}"
            lines.append(f"{given} has no effect {other}")
    return lines


def _is_met(need: str, values: dict[str, Any]) -> bool:
    if need.startswith("no "):
        return not values[need.removeprefix("no ")]
    name, _, wanted = need.partition("=")
    value = values[name]
    return (wanted in value if isinstance(value, list) else wanted == value) if wanted else bool(value)


def other_name(name: str, args_class: type[CommonArgs]) -> str | None:
    """This script's flag for another tool's name."""
    known = {f.name for f in dataclasses.fields(args_class)}
    return next((flag for flag in ALIASES.get(name, []) if flag in known), None)
