"""The arguments that all four scripts share, and how they are read: command line > YAML (--config) > default.

A script extends `CommonArgs` with its own fields, of the types str, int, float, bool, Literal, list[...] and any of them
| None, and ends with `launch(main, Args, ...)`. Everything under `common/` may read any field of `CommonArgs`, and none of
a script's own.
"""

import argparse
import dataclasses
import difflib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from common.errors import UserError, say, show_and_exit
from common.memory import is_oom

import yaml

# What another value of an argument means for a run that goes on from a checkpoint. Without a word it is another run, and
# refused: a new flag is refused until somebody has thought about it.
MayChange = Literal[
    "course",  # how training goes on from here: the learning rate, the micro-batches of a step
    "length",  # how long it lasts: with another value a complete run may go on
    "evaluation",  # what evaluations measure; they stay comparable, so not with --save_best
    "execution",  # how the run is carried out and what it writes
]


def arg(default: Any = None, *, help: str, may_change: MayChange | None = None) -> Any:
    """A field of the arguments, with the text that --help shows."""
    metadata = {"help": help, "may_change": may_change}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelArgs:
    """Model"""

    model_name_or_path: str | None = arg(help="Hub name or folder; unset: the last stage's output, else data/base_model")
    model_revision: str | None = arg(help="branch, tag or commit of a Hub model")
    tokenizer_name: str | None = arg(help="Hub name or folder of the tokenizer, where it is not the model's own")
    chat_template: str | None = arg(help="chatml, plain, or a .jinja file; unset: the tokenizer's own")
    trust_remote_code: bool = arg(False, help="run Python code that a Hub model brings along", may_change="execution")
    dtype: Literal["float32", "bfloat16"] = arg("float32", help="of the weights; autocast comes from accelerate config")
    gradient_checkpointing: bool = arg(
        False, help="recompute activations in the backward pass: less memory, ~30 %% slower", may_change="execution"
    )
    activation_offloading: bool = arg(
        False, help="and keep what they are recomputed from in the host's memory (CUDA)", may_change="execution"
    )
    torch_compile: bool = arg(False, help="compile the model's layers", may_change="execution")
    use_peft: bool = arg(False, help="train LoRA adapters (needs peft)")
    lora_r: int = arg(16, help="rank of the adapters")
    lora_alpha: int = arg(32, help="their scale is alpha / r")
    lora_dropout: float = arg(0.0, help="dropout in the adapters")
    lora_target_modules: list[str] | None = arg(help="names of the layers to adapt; unset: all linear layers")
    merge_lora: bool = arg(
        False, help="export the model with the adapters merged in, instead of the adapters", may_change="execution"
    )


@dataclass
class DataArgs:
    """Data"""

    dataset_name: list[str] | None = arg(help="Hub name, file (json, jsonl, parquet, csv, txt) or folder; one or several")
    dataset_config: str | None = arg(help="configuration of a Hub dataset")
    dataset_train_split: str = arg("train", help="split to train on")
    dataset_eval_split: str = arg(
        "validation", help="split to evaluate on, where the dataset has it", may_change="evaluation"
    )
    dataset_weights: list[float] | None = arg(help="share of each source among the samples; unset: each row once per epoch")
    dataset_format: str | None = arg(help="insist on a format, by name (see README); unset: recognised by the columns")
    columns: list[str] | None = arg(help="rename columns: prompt=question completion=answer")
    eval_dataset_name: list[str] | None = arg(help="a dataset of its own for evaluation", may_change="evaluation")
    eval_fraction: float = arg(0.0, help="hold out this share of the training rows, by a hash of the row")
    max_train_samples: int | None = arg(help="use the first N rows of each source only")
    max_eval_samples: int | None = arg(help="evaluate on the first N rows of each source only", may_change="evaluation")
    strict_data: bool = arg(
        False, help="a row that cannot be used ends the run, instead of being left out and counted", may_change="execution"
    )
    dataset_cache_dir: str = arg(
        "outputs/token_cache", help="folder of tokenised datasets, which later runs use again", may_change="execution"
    )
    dataset_num_proc: int | None = arg(help="processes that tokenise; unset: one for each core", may_change="execution")
    dataset_streaming: bool = arg(False, help="read and tokenise while training; needs max_steps")
    streaming_buffer_size: int = arg(10_000, help="rows that are packed and shuffled among themselves when streaming")
    curriculum_column: str | None = arg(help="a number in the rows, or length: from easy to hard at the start of the run")
    curriculum_fraction: float = arg(0.5, help="share of the first epoch that goes from easy to hard; the rest is shuffled")
    dry_run: bool = arg(
        False, help="show what would be trained on, and how, and stop; writes nothing in output_dir", may_change="execution"
    )


@dataclass
class BatchArgs:
    """Batch and length of the run"""

    per_device_train_batch_size: int = arg(8, help="per process and micro-batch", may_change="course")
    per_device_eval_batch_size: int = arg(16, help="the same, in evaluation", may_change="execution")
    gradient_accumulation_steps: int = arg(1, help="micro-batches per optimizer step", may_change="course")
    auto_micro_batch: bool = arg(
        False, help="try the largest before step 1, and cut them until they fit; the window stays", may_change="execution"
    )
    num_train_epochs: float = arg(1.0, help="passes over the data", may_change="length")
    max_steps: int = arg(-1, help="optimizer steps; above 0 it takes the place of num_train_epochs", may_change="length")


@dataclass
class OptimizerArgs:
    """Optimizer"""

    MAY_CHANGE = "course"  # where a field says nothing else

    learning_rate: float = arg(2e-5, help="peak learning rate of AdamW")
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] = arg("cosine", help="wsd: flat, then linear")
    warmup_steps: float = arg(0.03, help="linear warm-up; a value below 1 is a share of the run")
    lr_decay_fraction: float = arg(0.2, help="wsd: the share of the run in which the rate falls")
    min_lr_ratio: float = arg(0.0, help="the rate at the end, as a share of the peak")
    weight_decay: float = arg(0.0, help="on matrices only, not on norms and biases")
    adam_beta1: float = arg(0.9, help="AdamW")
    adam_beta2: float = arg(0.999, help="AdamW")
    adam_epsilon: float = arg(1e-8, help="AdamW")
    max_grad_norm: float = arg(1.0, help="clip the gradient of the window to this norm; 0 turns clipping off")
    max_bad_steps: int = arg(
        3, help="end the run after so many steps in a row with a NaN or an infinity; none is taken", may_change="execution"
    )


@dataclass
class EvalArgs:
    """Evaluation, logging and saving"""

    MAY_CHANGE = "execution"  # where a field says nothing else

    eval_steps: int = arg(100, help="evaluate every N steps, and before the first and after the last; 0: never")
    eval_prompts: str | None = arg(
        help="file of rows {prompt, ...}: completed at each evaluation, scored by eval_reward_funcs", may_change="evaluation"
    )
    eval_reward_funcs: list[str] | None = arg(
        help="scores of the completions: names as for reward_funcs of train_grpo.py", may_change="evaluation"
    )
    reward_timeout: float = arg(600.0, help="seconds that one call of a reward function may take; 0: any")
    eval_temperatures: list[float] = arg(
        [0.0], help="sampling temperatures of those completions; 0 is greedy", may_change="evaluation"
    )
    eval_max_new_tokens: int = arg(128, help="their longest length", may_change="evaluation")
    num_samples: int = arg(3, help="completions shown at each evaluation (all of them go to samples.jsonl)")
    logging_steps: int = arg(10, help="write metrics every N steps")
    save_steps: int = arg(500, help="write a checkpoint every N steps; 0: only the final model")
    save_minutes: float | None = arg(help="write one, too, when the last is more than this many minutes ago")
    save_total_limit: int = arg(2, help="checkpoints to keep; 0: all")
    save_best: str | None = arg(
        help="a metric of the evaluations (min:NAME, max:NAME): its best checkpoint is kept and exported",
        may_change="course",
    )
    early_stopping_patience: int = arg(
        0, help="end after so many evaluations without a better save_best; 0: never", may_change="length"
    )
    early_stopping_delta: float = arg(0.0, help="what counts as better there: by at least this much", may_change="course")
    max_hours: float | None = arg(help="save and stop in time for this limit, counted from the start; exit code 75")
    report_to: str | None = arg(help="a tracker by name: tensorboard, wandb, trackio, swanlab, ...")
    run_name: str | None = arg(help="what the tracker calls this run")


@dataclass
class RunArgs:
    """Run"""

    output_dir: str = arg("outputs/run", help="folder of everything that the run leaves behind", may_change="execution")
    overwrite_output_dir: bool = arg(
        False, help="start over in a folder that holds an earlier run (which is deleted)", may_change="execution"
    )
    resume_from_checkpoint: str = arg(
        "auto", help="auto (newest whole checkpoint of this same run), none, or a folder", may_change="execution"
    )
    seed: int = arg(0, help="order of the data, initial weights, dropout, sampling: everything random")


@dataclass
class CommonArgs(RunArgs, EvalArgs, OptimizerArgs, BatchArgs, DataArgs, ModelArgs):
    """What all four scripts share. The order of the groups is that of --help."""


Args = TypeVar("Args", bound=CommonArgs)


def parse_args(args_class: type[Args], demo: str, default_model: str | None = None, argv: list[str] | None = None) -> Args:
    """The arguments of a run, or UserError for an unknown flag or key, or a value of the wrong type.

    demo: the YAML file of the embedded default. It applies, and that is said, when neither a model nor a dataset is named;
    it lies beneath --config and the command line. Where only a model is named, its dataset does. default_model: the output
    folder of the stage before, the default of --model_name_or_path; None: a new model.
    """
    words = [_spelled(word) for word in (sys.argv[1:] if argv is None else argv)]
    config, words = _split_config(words)
    if config:
        words = _yaml_as_flags(config, args_class) + words
    args = _parse(words, args_class)
    if args.dataset_name is None and args.model_name_or_path is None:
        say(f"no --dataset_name and no --model_name_or_path: the embedded demo, {demo}", sys.stderr)
        args = _parse(_yaml_as_flags(demo, args_class) + words, args_class)
    if args.dataset_name is None:
        args.dataset_name = _parse(_yaml_as_flags(demo, args_class), args_class).dataset_name
    if args.model_name_or_path is None and default_model is not None:
        args.model_name_or_path = _last_stage(default_model)
    return args


def launch(main: Callable[[Args], None], args_class: type[Args], demo: str, default_model: str | None = None) -> None:
    """Read the arguments (see `parse_args`), call `main` with them, and end the process.

    A UserError becomes one line and exit code 1; so does running out of memory outside of the training steps.
    """
    code: str | int | None = 0
    try:
        main(parse_args(args_class, demo, default_model))
    except UserError as error:
        show_and_exit(error)
    except (RuntimeError, MemoryError) as error:
        if not is_oom(error):
            raise
        reason = " ".join(str(error).split())[:160] or "MemoryError"
        where = "outside of the training steps: lower --per_device_eval_batch_size or --eval_max_new_tokens"
        show_and_exit(
            UserError(f"out of memory {where} ({reason}); what was saved is kept, the same command goes on from it")
        )
    except KeyboardInterrupt:  # while data and model are loaded; common/run/signals.py takes over for the training
        say("stopped before the first step: there is nothing to save")
        code = 130
    except SystemExit as stop:
        code = stop.code or 0
    sys.stdout.flush()
    sys.stderr.flush()
    if code or os.environ.get("WORLD_SIZE", "1") != "1":  # nothing is destroyed: see KEPT in common/run/launch.py
        os._exit(int(code))


def save_args(args: CommonArgs, path: Path) -> None:
    """Every argument with its value, so that `--config <path>` repeats the run."""
    path.write_text(yaml.safe_dump(dataclasses.asdict(args), sort_keys=False, allow_unicode=True), encoding="utf-8")


def may_change(args_class: type[CommonArgs]) -> dict[str, MayChange | None]:
    """What another value of each argument means for a run that goes on (see MayChange)."""
    found = {}
    for f in dataclasses.fields(args_class):
        cls, first = _first_definition(args_class, f.name)
        found[f.name] = first.metadata.get("may_change") or vars(cls).get("MAY_CHANGE")
    return found


def _last_stage(output_dir: str) -> str:
    """The model that a stage starts from by default: the stage before, if it has finished, else the one that ships here."""
    base = "data/base_model"
    if Path(output_dir, "summary.json").exists():
        say(f"model: {output_dir} (the finished run of the last stage)")
        return output_dir
    if not Path(base, "config.json").exists():
        raise UserError(f"no --model_name_or_path, and neither {output_dir} nor {base} is here: name a model")
    script = f"train_{Path(output_dir).name}.py"
    say(f"model: {base} (it ships here; there is no finished run in {output_dir}, which {script} would make)")
    return base


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UserError(f"{message} (--help lists the flags)")


def _parse(words: list[str], args_class: type[Args]) -> Args:
    parser = _Parser(allow_abbrev=False, usage="%(prog)s [--config FILE] [--flag value ...]")
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these arguments")  # taken out before
    own = parser.add_argument_group("This script")
    groups = {args_class: own} | {cls: parser.add_argument_group(cls.__doc__) for cls in reversed(CommonArgs.__mro__[1:-1])}
    types = get_type_hints(args_class)
    for f in dataclasses.fields(args_class):
        kind, options = types[f.name], {}
        group = groups.get(_first_definition(args_class, f.name)[0], own)
        if get_origin(kind) in (Union, UnionType):  # X | None
            kind = next(part for part in get_args(kind) if part is not NoneType)
        if get_origin(kind) is list:
            kind, options = get_args(kind)[0], {"nargs": "+"}
        if get_origin(kind) is Literal:
            options |= {"choices": get_args(kind), "type": type(get_args(kind)[0])}
        else:
            options |= {"metavar": kind.__name__.upper(), "type": kind}
        default = f.default_factory() if f.default is dataclasses.MISSING else f.default
        if kind is bool:
            options |= {"metavar": "true/false", "type": _true_or_false, "nargs": "?", "const": True}
            group.add_argument(f"--no_{f.name}", dest=f.name, action="store_false", default=default, help=argparse.SUPPRESS)
        shown = "" if default is None else f" (default: {default})".replace("%", "%%")
        group.add_argument(f"--{f.name}", default=default, help=f.metadata["help"] + shown, **options)
    parsed, unknown = parser.parse_known_args(words)
    if unknown:
        raise UserError(_unknown("flag", unknown[0], args_class, prefix="--"))
    values = vars(parsed)
    del values["config"]
    return args_class(**values)


def _first_definition(args_class: type, name: str) -> tuple[type, dataclasses.Field]:
    """The class that introduces a field, and the field as it stands there: a script changes defaults and help only."""
    cls = next(cls for cls in reversed(args_class.__mro__) if name in cls.__dict__.get("__annotations__", {}))
    return cls, cls.__dataclass_fields__[name]


def _true_or_false(word: str) -> bool:
    if word.lower() in ("true", "yes", "y", "t", "1"):
        return True
    if word.lower() in ("false", "no", "n", "f", "0"):
        return False
    raise argparse.ArgumentTypeError(f"true or false, not {word}")


def _spelled(word: str) -> str:
    """--learning-rate as --learning_rate."""
    flag, *value = word.split("=", 1)
    return "=".join([flag[:2] + flag[2:].replace("-", "_"), *value]) if word.startswith("--") else word


def _split_config(argv: list[str]) -> tuple[str | None, list[str]]:
    """(the file behind --config, the other arguments)."""
    for i, word in enumerate(argv):
        if word == "--config":
            if i + 1 == len(argv):
                raise UserError("--config needs a YAML file")
            return argv[i + 1], argv[:i] + argv[i + 2 :]
        if word.startswith("--config="):
            return word.removeprefix("--config="), argv[:i] + argv[i + 1 :]
    return None, argv


def _yaml_as_flags(path: str, args_class: type) -> list[str]:
    """A YAML mapping as command-line words, so that both go through the same conversion and checks."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--config {path}: there is no such file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config {path}: cannot be read as YAML: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: expected `name: value` lines")
    known = {f.name for f in dataclasses.fields(args_class)}
    words = []
    for name, value in values.items():
        if name not in known:
            raise UserError(f"--config {path}: {_unknown('key', str(name), args_class)}")
        if isinstance(value, dict):
            raise UserError(f"--config {path}: {name} takes a value or a list, not a mapping")
        if isinstance(value, list):  # a mapping in a list is a source with its settings
            words += [f"--{name}", *(json.dumps(v) if isinstance(v, dict) else str(v) for v in value)] if value else []
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


def _unknown(kind: str, word: str, args_class: type, prefix: str = "") -> str:
    name = word.removeprefix("--").split("=")[0].replace("-", "_")
    near = difflib.get_close_matches(name, [f.name for f in dataclasses.fields(args_class)], n=1)
    return f"unknown {kind} {word}" + (f": did you mean {prefix}{near[0]}?" if near else " (--help lists the flags)")
