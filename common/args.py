"""The arguments that all four scripts share: names, meanings and valid values.

A script extends `CommonArgs` with its own fields, of the types str, int, float, bool, Literal, list[...] and
any of them | None. Everything under `common/` may read any field of `CommonArgs`, and none of a script's own.
"""

from collections.abc import Mapping
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from common.files import replace_text
import yaml

# What a new value of an argument changes in a run that resumes from a checkpoint. Without an entry the run
# counts as a different one and is refused, so a new flag is refused until somebody has thought about it.
MayChange = Literal[
    "training",  # how training continues from here: the learning rate, the micro-batches of a step
    "duration",  # how long training lasts: with another value a complete run may continue
    "evaluation",  # what evaluations measure; refused with --save_best, which compares evaluations
    "execution",  # how the run is executed and what it writes
    "no",  # as without an entry, although the flag's group has one
]


def arg(
    default: Any = None,
    *,
    help: str = "",
    within: str | None = None,
    may_change: MayChange | None = None,
    is_path: bool = False,
    goes_with: str | None = None,
    needs: str | None = None,
) -> Any:
    """A field of the arguments, with the text that --help shows.

    is_path: names a file, a folder or something on the Hub. goes_with: another argument; if that is given,
    the demo's value of this one no longer applies.

    needs: other arguments without which this one has no effect: "use_peft", "lr_scheduler_type=wsd", "no
    config_name", several separated by commas. A value given in vain is reported.

    within: the valid values of a number, or of each number in a list: an interval like "[0, 1)", or several
    values and intervals, "-1 or [1, 1e12]". Unset: any finite number. A script that changes a shared
    argument's default need not repeat it.
    """
    metadata = dict(
        help=help, within=within, may_change=may_change, is_path=is_path, goes_with=goes_with, needs=needs
    )
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelArgs:
    """Model"""

    model_name_or_path: str | None = arg(
        help="Hub name or folder; unset: the last stage's, or data/base_model", is_path=True
    )
    model_revision: str | None = arg(help="branch, tag or commit of a Hub model")
    tokenizer_name: str | None = arg(
        help="Hub name or folder of the tokenizer, if it is not the model's own", is_path=True
    )
    chat_template: str | None = arg(help="chatml, plain, or a .jinja file; unset: the tokenizer's own")
    template_kwargs: list[str] | None = arg(
        help="variables of the chat template, for instance enable_thinking=false"
    )
    trust_remote_code: bool = arg(
        False, help="run Python code that comes with a Hub model", may_change="execution"
    )
    dtype: Literal["float32", "bfloat16", "auto"] = arg(
        "float32", help="dtype of the weights; auto: that of the files"
    )
    gradient_checkpointing: bool = arg(
        False, help="recompute activations: less memory, 30 % slower", may_change="execution"
    )
    torch_compile: bool = arg(False, help="compile the model's layers", may_change="execution")
    use_peft: bool = arg(False, help="train LoRA adapters (needs peft)")
    lora_r: int = arg(16, help="rank of the adapters", within="[1, 1e5]", needs="use_peft")
    lora_alpha: int = arg(
        32, help="the adapters are scaled by alpha / r", within="[1, 1e6]", needs="use_peft"
    )
    lora_dropout: float = arg(0.0, help="dropout in the adapters", within="[0, 1)", needs="use_peft")
    lora_target_modules: list[str] | None = arg(
        help="layers to adapt; unset: all linear ones but head and routers", needs="use_peft"
    )
    use_dora: bool = arg(
        False, help="DoRA: train each row's magnitude and direction separately (slower)", needs="use_peft"
    )
    use_rslora: bool = arg(False, help="scale the adapters by alpha / sqrt(r), for large r", needs="use_peft")
    load_in_4bit: bool = arg(
        False, help="QLoRA: the frozen base in NF4, under --use_peft (needs bitsandbytes)"
    )
    load_in_8bit: bool = arg(False, help="the same in 8 bits")
    merge_lora: bool = arg(
        False,
        help="export the merged model instead of the adapters",
        may_change="execution",
        needs="use_peft",
    )


@dataclass
class DataArgs:
    """Data"""

    dataset_name: list[str] | None = arg(
        help="Hub names, files (json, jsonl, parquet, csv, txt) or folders", is_path=True
    )
    dataset_config: str | None = arg(help="configuration of a Hub dataset")
    dataset_train_split: str = arg("train", help="split to train on")
    dataset_eval_split: str = arg("validation", help="split to evaluate on", may_change="evaluation")
    dataset_weights: list[float] | None = arg(
        help="shares of the sources; unset: each row once per epoch", within="(0, inf)"
    )
    columns: list[str] | None = arg(help="rename columns: prompt=question completion=answer")
    eval_dataset_name: list[str] | None = arg(
        help="datasets for evaluation", may_change="evaluation", is_path=True
    )
    eval_fraction: float = arg(
        0.0, help="hold out this share of the training rows, by a hash of the row", within="[0, 1)"
    )
    max_train_samples: int | None = arg(help="use only the first N rows of each source", within="[1, inf)")
    max_eval_samples: int | None = arg(
        help="evaluate on the first N rows of each source", within="[1, inf)", may_change="evaluation"
    )
    dataset_cache_dir: str = arg(
        "outputs/token_cache", help="cache of tokenised datasets", may_change="execution", is_path=True
    )
    dataset_num_proc: int | None = arg(
        help="processes that tokenise; unset: one per core", within="[1, 1e3]", may_change="execution"
    )
    dataset_streaming: bool = arg(False, help="read and tokenise while training; needs max_steps")
    curriculum_column: str | None = arg(
        help="column with each row's difficulty, or length: start the run from easy to hard"
    )
    dry_run: bool = arg(
        False, help="show what would be trained, and how; writes no output_dir", may_change="execution"
    )


@dataclass
class BatchArgs:
    """Batch and length of the run"""

    per_device_train_batch_size: int = arg(
        8, help="per process and micro-batch", within="[1, 1e6]", may_change="training"
    )
    per_device_eval_batch_size: int = arg(
        16, help="the same for evaluation", within="[1, 1e6]", may_change="execution"
    )
    gradient_accumulation_steps: int = arg(
        1, help="micro-batches of a step", within="[1, 1e6]", may_change="training"
    )
    auto_micro_batch: bool = arg(
        False,
        help="several processes: split micro-batches, too, when memory runs out",
        may_change="execution",
    )
    empty_cache_above: float | None = arg(
        help="release cached memory above this share; unset: 0.9, but not on CUDA",
        within="(0, 1]",
        may_change="execution",
    )
    num_train_epochs: float = arg(1.0, help="passes over the data", within="(0, 1e6]", may_change="duration")
    max_steps: int = arg(
        -1, help="optimizer steps; -1: by num_train_epochs", within="-1 or [1, 1e12]", may_change="duration"
    )


@dataclass
class OptimizerArgs:
    """Optimizer"""

    MAY_CHANGE = "training"  # unless a field says otherwise

    optim: Literal["adamw", "adamw_8bit", "muon"] = arg(
        "adamw", help="muon: for matrices, AdamW for the rest, same rate", may_change="no"
    )
    learning_rate: float = arg(2e-5, help="peak learning rate of AdamW", within="[0, inf)")
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] = arg(
        "cosine", help="wsd: flat, then linear"
    )
    warmup_steps: float = arg(
        0.03, help="linear warm-up; a value below 1 is a share of the run", within="[0, 1e12]"
    )
    lr_decay_fraction: float = arg(
        0.2, help="share of the run that decays", within="(0, 1]", needs="lr_scheduler_type=wsd"
    )
    min_lr_ratio: float = arg(0.0, help="final learning rate, as a share of the peak", within="[0, 1]")
    weight_decay: float = arg(0.0, help="on matrices only, not on norms and biases", within="[0, inf)")
    adam_beta1: float = arg(0.9, help="AdamW", within="[0, 1)")
    adam_beta2: float = arg(0.999, help="AdamW", within="[0, 1)")
    adam_epsilon: float = arg(1e-8, help="AdamW", within="(0, inf)")
    max_grad_norm: float = arg(
        1.0, help="clip the window's gradient to this norm; 0: never", within="[0, inf)"
    )
    router_aux_loss_coef: float | None = arg(
        help="weight of the experts' load-balancing loss; unset: as in the model's config", within="[0, inf)"
    )


@dataclass
class EvalArgs:
    """Evaluation, logging and saving"""

    MAY_CHANGE = "execution"  # unless a field says otherwise

    eval_steps: int = arg(
        100, help="evaluate every N steps, before the first, after the last; 0: never", within="[0, 1e12]"
    )
    eval_prompts: str | None = arg(
        help="file of rows {prompt, ...}: completed at each evaluation, scored by eval_reward_funcs",
        may_change="evaluation",
        is_path=True,
    )
    eval_reward_funcs: list[str] | None = arg(
        help="scores of the completions, named as GRPO's reward_funcs", may_change="evaluation", is_path=True
    )
    eval_temperatures: list[float] = arg(
        [0.0], help="their temperatures; 0: greedy", within="[0, inf)", may_change="evaluation"
    )
    eval_max_new_tokens: int = arg(
        128, help="maximum tokens of a completion", within="[1, 1e7]", may_change="evaluation"
    )
    regression_suite: str | None = arg(
        help="file of rows {id, group, prompt or messages, checks} to test the model with (docs/regression.md)",
        may_change="evaluation",
        is_path=True,
    )
    regression_steps: int | None = arg(
        help="run the suite every N steps; 0: only before the first and after the last; unset: eval_steps",
        within="[0, 1e12]",
        needs="regression_suite",
    )
    num_samples: int = arg(
        3, help="completions shown at each evaluation; samples.jsonl has all", within="[0, 1e6]"
    )
    logging_steps: int = arg(10, help="write metrics every N steps", within="[0, 1e12]")
    save_steps: int = arg(
        500, help="write a checkpoint every N steps; 0: only the final model", within="[0, 1e12]"
    )
    save_minutes: float | None = arg(
        help="also write a checkpoint after this many minutes", within="(0, 1e9]"
    )
    save_total_limit: int = arg(2, help="checkpoints to keep; 0: all", within="[0, 1e6]")
    save_best: str | None = arg(
        help="a metric of the evaluations (min:NAME, max:NAME): its best checkpoint is kept and exported",
        may_change="training",
    )
    early_stopping_patience: int = arg(
        0,
        help="end after N evaluations without a better save_best; 0: never",
        within="[0, 1e6]",
        may_change="duration",
    )
    early_stopping_delta: float = arg(
        0.0,
        help="smallest improvement that resets the patience",
        within="[0, inf)",
        may_change="training",
        needs="early_stopping_patience",
    )
    max_hours: float | None = arg(help="save and stop before this limit; exit code 75", within="(0, 1e6]")
    report_to: str | None = arg(help="a tracker by name: tensorboard, wandb, trackio, swanlab, ...; none")
    run_name: str | None = arg(help="name of the run in the tracker")
    alert_webhook: str | None = arg(
        help="URL that alerts are posted to (Slack, Discord, JSON); it is a secret: better set PLAINLOOP_ALERT_WEBHOOK"
    )


@dataclass
class RunArgs:
    """Run"""

    MAY_CHANGE = "execution"  # unless a field says otherwise

    output_dir: str = arg("outputs/run", help="folder for all that the run writes", is_path=True)
    overwrite_output_dir: bool = arg(False, help="start over: an earlier run in the folder is deleted")
    accept_changes: bool = arg(False, help="resume although script, data or code was changed")
    resume_from_checkpoint: str = arg(
        "auto",
        help="auto (newest intact checkpoint of this run), none, or one of another folder",
        is_path=True,
    )
    seed: int = arg(
        0, help="seed of the order, initial weights, dropout, sampling", within="[0, 1e9]", may_change="no"
    )
    push_to_hub: bool = arg(False, help="push the final model and its card to the Hub")
    hub_model_id: str | None = arg(help="repository on the Hub: OWNER/NAME", needs="push_to_hub")


@dataclass
class CommonArgs(RunArgs, EvalArgs, OptimizerArgs, BatchArgs, DataArgs, ModelArgs):
    """The arguments that all four scripts share."""


# In the order of --help.
ARGUMENT_GROUPS = (ModelArgs, DataArgs, BatchArgs, OptimizerArgs, EvalArgs, RunArgs)


def save_args(args: CommonArgs, path: Path) -> None:
    """Write every argument with its value, so that `--config <path>` repeats the run."""
    replace_text(path, yaml.safe_dump(dataclasses.asdict(args), sort_keys=False, allow_unicode=True))


def may_change(args_class: type[CommonArgs]) -> dict[str, MayChange]:
    """What a new value of each argument changes in a resumed run (see MayChange); "no": it is refused."""
    effects = {}
    for f in dataclasses.fields(args_class):
        cls, first = first_definition(args_class, f.name)
        effects[f.name] = first.metadata.get("may_change") or vars(cls).get("MAY_CHANGE", "no")
    return effects


def is_within(number: float, within: str) -> bool:
    """Whether a number matches a value or an interval in a text like "-1 or [1, 1e12]"."""
    for part in within.split(" or "):
        if part[0] not in "[(":
            if number == float(part):
                return True
            continue
        low, high = map(float, part[1:-1].split(","))
        is_above = low < number if part[0] == "(" else low <= number
        is_below = number < high if part[-1] == ")" else number <= high
        if is_above and is_below:
            return True
    return False


def defaults(args_class: type[CommonArgs]) -> dict[str, Any]:
    values = {}
    for f in dataclasses.fields(args_class):
        values[f.name] = f.default_factory() if f.default is dataclasses.MISSING else f.default
    return values


def declared(args_class: type[CommonArgs], name: str) -> Mapping[str, Any]:
    """What `arg` says of an argument where it is first defined; without `arg`, None for all of it."""
    return first_definition(args_class, name)[1].metadata or arg().metadata


def first_definition(args_class: type, name: str) -> tuple[type, dataclasses.Field]:
    """The class that introduces a field, and the field as defined there: scripts change only defaults and
    help."""
    for cls in reversed(args_class.__mro__):
        fields = vars(cls).get("__dataclass_fields__", {})
        if name in fields:
            return cls, fields[name]
    raise KeyError(name)
