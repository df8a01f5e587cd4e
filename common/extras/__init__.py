"""What one flag, or one kind of model, asks for. No module of the core imports one of these at its top.

The table is the whole list: module -> what asks for it.
"""

import importlib
from types import ModuleType

EXTRAS: dict[str, str] = {
    "alerts": "--alert_webhook",
    "best": "--save_best, --early_stopping_patience",
    "hub": "every run, when its model card is written; --push_to_hub",
    "clock": "--max_hours, --save_minutes",
    "compiled_head": "training on a CUDA device",
    "cuda_graph": "sampling on a CUDA device",
    "dry_run": "--dry_run",
    "experts": "a mixture of experts",
    "sharded": "an accelerate config with FSDP or DeepSpeed",
    "fused_layers": "norms and MLPs of Llama's form, GELUs of GPT-2's",
    "hybrids": "recurrent layers, positions that depend on the length",
    "lora": "--use_peft, or an adapter as the model",
    "merge": "--merge_lora, --rollout_server",
    "mfu": "training on a CUDA device",
    "muon": "--optim muon",
    "other_names": "an unknown flag",
    "padded": "models whose attention cannot be replaced; sampling where layers keep a state",
    "precomputed": "--precompute_ref_log_probs",
    "quantised": "--load_in_4bit, --load_in_8bit",
    "regression": "--regression_suite",
    "reward_model": "a model among --reward_funcs or --eval_reward_funcs",
    "report": "every run, when report.html is written",
    "stream": "--dataset_streaming",
    "tables": "csv, tsv and parquet files, save_to_disk folders, datasets of the Hub",
    "tokenizer": "pretraining without a tokenizer: --vocab_size",
    "token_budget": "--max_tokens_per_batch",
    "trackers": "--report_to",
    "turn_dropping": "--turn_dropping",
    "varlen": "attention on a CUDA device",
    "vllm": "--rollout_server",
}


def extra(name: str) -> ModuleType:
    """The module common.extras.<name>, imported where the flag is read."""
    assert name in EXTRAS, name
    return importlib.import_module(f"common.extras.{name}")
