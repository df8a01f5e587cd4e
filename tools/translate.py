"""Translate another trainer's settings: `python -m tools.translate theirs.yaml`.

Reads what TRL, transformers, LLaMA-Factory, axolotl, unsloth and the alignment-handbook call their settings: a
YAML or JSON file, a Python script or notebook, a shell script, or a command line:

    python -m tools.translate llamafactory-cli train examples/train_lora/qwen3_lora_sft.yaml learning_rate=1e-4
    python -m tools.translate trl dpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name pairs.jsonl --bf16

Writes a config for our scripts, with a comment on each line that is not as it was, and prints how to start it.
Each setting of theirs is in the config, or in a list at its end that says why it is not. The names are in a
table, common/other_names.yaml; a setting that needs more than a name has a method of `Translation`.
"""

import argparse
import importlib
import math
from pathlib import Path
import re
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from common.args import defaults
from common.command_line import checked, kind_of, parse_args
from common.data.formats import ROLES
from common.errors import UserError, printable, quoted
from common.other_names import said_here, table, value_here
from common.sampling.rewards import OF_TRL
import yaml

from tools import as_command
from tools.translate_read import Theirs, read, read_file

STAGES = {"sft": "train_sft.py", "dpo": "train_dpo.py", "orpo": "train_dpo.py", "grpo": "train_grpo.py"}
STAGES |= {"kto": "experiments/train_kto.py", "reward": "experiments/train_reward.py"}
STAGES |= {"pretrain": "train_pretrain.py", "cpt": "train_pretrain.py", "run_clm": "train_pretrain.py"}
STAGE = re.compile(rf"(?<![a-zA-Z])({'|'.join(STAGES)})(?![a-z])", re.IGNORECASE)
# Dictionaries whose entries are settings like those beside them.
NESTED = ("trl", "peft", "peft_config", "model_init_kwargs", "training_arguments", "quant_config")
# Rewards of open-r1, by the names of TRL's for the same.
OF_OPEN_R1 = {"accuracy": "accuracy_reward", "format": "think_format_reward"}
# Templates that are formats of their own, not those of a model's tokenizer.
FORMATS = ("default", "alpaca", "vicuna", "empty", "fewshot", "zephyr", "belle", "ziya")
# Columns by the names that axolotl and LLaMA-Factory have for them.
COLUMNS = {
    "field": "text",
    "text_column": "text",
    "field_messages": "messages",
    "field_label": "label",
    "field_tools": "tools",
}
COLUMNS |= {f"field_{name}": name for name in ("prompt", "completion", "chosen", "rejected", "system")}
COLUMNS |= {f"field_{name}": name for name in ("instruction", "input", "output")}
COLUMNS |= {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
COLUMNS |= {name: name for name in ("chosen", "rejected", "kto_tag", "system", "tools", "history")}
# Entries of a dataset that say how its rows are to be read.
BY_COLUMNS = ("type", "formatting", "ds_type", "ranking", "columns", "chat_template")
BY_COLUMNS += ("ms_hub_url", "om_hub_url", "trust_remote_code")
# Entries with names that a row's messages have, and those that are read.
NAMES_IN_ROWS = ("tags", "roles", "message_property_mappings")
KNOWN_NAMES = {*ROLES, "role", "from", "content", "value", "tools", "tool_calls", "tool_call_id", "name"}
# Types of axolotl that read columns of their own.
OWN_COLUMNS = re.compile(r"(chatml|llama3|zephyr)\.")


# --- translating --------------------------------------------------------------------------------------------


def here_as(word: str) -> str:
    """A word of a launcher; a config that is not there is ours of the same name, if there is one."""
    name = re.sub(r"^(deepspeed_)?zero_?(stage)?(\d)\.yaml$", r"deepspeed_zero\3.yaml", Path(word).name)
    ours = Path("accelerate_configs", name)
    return str(ours) if ours.suffix == ".yaml" and ours.exists() and not Path(word).exists() else word


class Translation:
    """Their settings as ours: what to write, what needs nothing, and what is lost."""

    def __init__(self, theirs: Theirs, out: Path):
        """out: the file that it is written to."""
        self.theirs = theirs
        self.folder = out.parent
        self.stem = out.stem
        self.ours: dict[str, Any] = {}
        self.comments: dict[str, str] = {}  # of what is not as it was
        self.nothing: list[str] = []  # needs no setting here
        self.lost: list[tuple[str, str]] = []  # (setting of theirs, why)
        self.files: dict[str, str] = {}  # to write beside the config
        self.launch_config = ""  # words of accelerate launch
        self.launch_precision = ""
        self.processes = theirs.settings.get("num_processes") or 1
        if found := re.search(r"--num_processes[= ](\d+)", " ".join(theirs.launcher)):
            self.processes = int(found[1])
        self.script = self.find_script()
        self.args_class = importlib.import_module(self.script.removesuffix(".py").replace("/", ".")).Args
        self.flags = defaults(self.args_class)
        if "orpo" in theirs.hints.lower():
            self.set("loss_type", ["orpo"], "the trainer's name")
        for kind in ("eval", "save"):
            unused = f"{kind}_steps"
            old = theirs.settings.get("evaluation_strategy") if kind == "eval" else None
            if theirs.settings.get(f"{kind}_strategy", old) in ("no", False) and unused in theirs.settings:
                self.nothing.append(f"{unused}: {theirs.settings.pop(unused)} (the strategy is: no)")
        self.take_sft_from_mixture()
        # those with our names first, and the metric before the switch that stands for eval_loss
        names = sorted(
            theirs.settings, key=lambda name: (name not in self.flags, name.startswith("load_best"))
        )
        for name in names:
            self.add(name, theirs.settings[name])
        self.add_defaults()

    def find_script(self) -> str:
        """The script of the stage: by a setting for it, by settings of one stage only, by words of the
        command or the path."""
        given = self.theirs.settings
        for name in ("stage", "rl"):
            here = value_here(name, given.get(name))
            if isinstance(here, dict):
                return here["script"]
            if given.get(name):
                raise UserError(
                    f"{name}: {given[name]}: there is no script for it here ({', '.join(STAGES)})"
                )
        if named := STAGE.findall(self.theirs.hints):
            return STAGES[named[-1].lower()]
        if {"num_generations", "reward_funcs"} & given.keys():
            return "train_grpo.py"
        if {"beta", "pref_beta", "precompute_ref_log_probs", "max_prompt_length"} & given.keys():
            return "train_dpo.py"
        return "train_pretrain.py" if "pretraining_dataset" in given else "train_sft.py"

    def launch(self) -> str:
        """The words of accelerate launch; none where python starts the script."""
        if self.theirs.launcher:
            return " ".join(map(here_as, self.theirs.launcher))
        config, processes = self.launch_config, ""
        if self.processes > 1:
            config = config.replace("single_gpu", "multi_gpu") or "--multi_gpu"
            processes = f"--num_processes {self.processes}"
        return " ".join(filter(None, (config, self.launch_precision, processes)))

    def set(self, name: str, value: Any, comment: str) -> None:
        """Write a setting of ours. One that was set before stays, unless it is off; lists grow."""
        before = self.ours.get(name)
        if isinstance(before, list) and name in ("columns", "dataset_name"):
            value = before + [item for item in value if item not in before]
        elif before and not same(before, value):
            self.lose(comment, f"{name} is set already, to {before}")
            return
        self.ours[name] = value
        if comment:
            self.comments[name] = comment

    def lose(self, what: str, why: str) -> None:
        self.lost.append((what, why))

    def add(self, name: str, value: Any) -> None:
        """Translate a setting of theirs."""
        has_limit = name == "max_length" and self.theirs.trainer == "TRL" and name in self.flags
        if value is None and has_limit:
            self.lose("max_length: null", f"without limit there, here {self.flags[name]}: write a number")
        if value is None or value in ("", [], {}):
            return  # unset
        special = getattr(self, f"add_{name}", None)
        if isinstance(value, dict) and "_component_" in value:
            raise UserError(f"{name}: a component of torchtune; its configs are not translated")
        if isinstance(value, dict) and name in NESTED:
            for key, part in value.items():
                self.add(key, part)
        elif special:
            special(name, value)
        else:
            self.add_by_name(name, value)

    def add_by_name(self, name: str, value: Any) -> None:
        """Translate a setting by the table."""
        shown = f"{name}: {quoted(value, 60, str)}"
        if name in self.flags:
            meaning = self.meaning(name, value, exact_value(name, value))
            for ours, setting in self.settings_of(shown, meaning).items():
                self.set(ours, setting, "" if ours == name and same(setting, value) else shown)
        else:
            here = said_here(name)
            flag = re.match(r"--(\w+)(?=$|;| [(])", here or "")  # without a value in the table
            meaning = value_here(name, value)
            if meaning is None and value is False:
                meaning = {}  # what is off there
            if meaning is None and flag and flag[1] in self.flags:
                meaning = self.meaning(flag[1], value, exact_value(flag[1], value))
            if meaning is None and flag:
                meaning = f"{self.script} has no {here}"
            if meaning is None:
                done = here and here.startswith("done here")
                meaning = {} if done else here or "not known here"
            for ours, setting in self.settings_of(shown, meaning).items():
                self.set(ours, setting, name if same(setting, value) else shown)

    def meaning(self, flag: str, value: Any, exact: Any) -> dict[str, Any] | str:
        """A value of theirs as settings of ours, under the flag unless the table says otherwise; or why not."""
        if exact is not None:
            return exact
        _, several = kind_of(self.args_class, flag)
        if several and isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        found, mistakes = checked({flag: value}, self.args_class, "")
        return f"--{flag}: {mistakes[0].why}" if mistakes else found

    def settings_of(self, shown: str, meaning: dict[str, Any] | str) -> dict[str, Any]:
        """The settings of ours in a meaning; the launcher, the script, and what is lost are noted."""
        if isinstance(meaning, str):
            self.lose(shown, meaning)
            return {}
        settings = dict(meaning)
        settings.pop("script", None)
        launch = settings.pop("launch", "")
        if launch and self.theirs.launcher and launch not in self.launch():
            given = launch.replace(
                "--config_file accelerate_configs/single_gpu.yaml", "--mixed_precision bf16"
            )
            self.lose(shown, f"the launcher is yours: unless it does so already, give it {given}")
            return {}
        if "mixed_precision" in launch:
            self.launch_precision = launch
        elif launch and (not self.launch_config or "single_gpu" in self.launch_config):
            self.launch_config = launch
        unknown = [name for name in settings if name not in self.flags]
        if unknown:
            self.lose(shown, f"{self.script} has no --{unknown[0]}")
            return {}
        if not settings:
            self.nothing.append(f"{shown} (by accelerate launch)" if launch else shown)
        return settings

    def add_computed_values(self, name: str, value: dict[str, str]) -> None:
        for setting, expression in value.items():
            here = said_here(setting)
            why = "computed in the script: write the value into the config"
            if setting.startswith("**"):
                why = f"computed in the script, so no defaults of {self.theirs.trainer} are written"
            if setting not in self.flags and here and not here.startswith("--"):
                why = here
            self.lose(f"{setting}={quoted(expression, 60, str)}", why)

    def add_later_values(self, name: str, value: list[str]) -> None:
        for later in value:
            self.lose(quoted(later, 60, str), "a later value: the first one in the script counts")

    def add_defaults(self) -> None:
        """Their defaults where ours differ."""
        trainer, given = self.theirs.trainer, self.theirs.settings
        evaluates = given.get("eval_strategy", given.get("evaluation_strategy"))
        computed = set()
        for name in given.get("computed_values", {}):
            computed |= {name, *re.findall(r"^--(\w+)", said_here(name) or "")}
        theirs = dict(table().defaults[trainer])
        if self.script == "train_pretrain.py":
            theirs = {"weight_decay": 0.0, "adam_beta2": 0.999} | theirs
        if trainer == "TRL" and "train_reward" in self.script:
            theirs["learning_rate"] = 1e-4
        if "finetuning_type" in given:
            theirs.pop("use_peft", None)
        for name in computed:
            theirs.pop(name, None)
        if any(name.startswith("**") for name in computed):
            theirs = {}  # what is given there is not known
        for name, value in theirs.items():
            of_adapters = name.startswith(("lora_", "load_in_"))
            wanted = self.ours.get("use_peft") if of_adapters else name in self.flags
            if name == "dataset_eval_split":
                wanted = "dataset_name" in given and evaluates in ("steps", "epoch")
            if wanted and name not in self.ours:
                self.set(name, value, f"the default of {trainer}")
        if (
            self.ours.get("train_on") == "everything"
            and trainer in ("TRL", "unsloth")
            and "completion_only_loss" not in given
        ):
            self.lose(
                "completion_only_loss",
                "unset, which is true for rows of a prompt and a completion: leave train_on out",
            )
        if evaluates == "steps" and "eval_steps" not in {*given, *computed}:
            every = self.ours.get("logging_steps", 10 if trainer == "TRL" else 500)
            self.set("eval_steps", every, f"the default of {trainer}: logging_steps")
        adapts = self.ours.get("use_peft")
        if adapts and trainer == "LLaMA-Factory" and "lora_alpha" not in self.ours:
            self.set("lora_alpha", 2 * self.ours["lora_r"], "the default of LLaMA-Factory: 2 x lora_rank")
        if (
            adapts
            and trainer in ("LLaMA-Factory", "axolotl")
            and given.get("bf16") in (True, "true", "auto")
            and "dtype" not in self.ours
        ):
            self.set("dtype", "bfloat16", f"the frozen model's, as {trainer} loads it; adapters are float32")
        if adapts and "merge_lora" not in self.ours and "train_reward" in self.script:
            self.set("merge_lora", True, "the classifier that is saved is one model")
        if "chat_template" not in self.ours and self.script != "train_pretrain.py":
            model = self.ours.get("model_name_or_path")
            if model and lacks_template(model):
                self.set("chat_template", "chatml", "the tokenizer has none (rows of plain text need none)")

    # --- settings that need more than a name

    def take_sft_from_mixture(self) -> None:
        """TRL's `sft` among the losses of DPO, as in MPO, is a weight of its own here."""
        losses = self.theirs.settings.get("loss_type")
        weights = self.theirs.settings.get("loss_weights")
        if "sft_weight" not in self.flags or not isinstance(losses, list) or "sft" not in losses:
            return
        place = losses.index("sft")
        losses.pop(place)
        weight = weights.pop(place) if weights else 1.0
        self.set("sft_weight", weight, "sft, of loss_type")

    def add_chat_template(self, name: str, value: str) -> None:
        if "{%" in value or "{{" in value:
            self.files[f"{self.stem}.jinja"] = value
            self.set(
                "chat_template",
                str(self.folder / f"{self.stem}.jinja"),
                f"{name}, which was written in the config",
            )
        elif value in ("chatml", "plain") or value.endswith(".jinja"):
            self.set("chat_template", value, "" if name == "chat_template" else name)
        elif Path(value, "chat_template.jinja").exists():
            self.set("chat_template", str(Path(value, "chat_template.jinja")), name)
        elif self.script == "train_pretrain.py":
            self.nothing.append(f"{name}: {value} (no template in pretraining)")
        elif value in FORMATS:
            self.lose(
                f"{name}: {value}",
                "the tokenizer's own format is used; another one: --chat_template FILE.jinja",
            )
        else:
            self.nothing.append(f"{name}: {value} (the tokenizer's own is used, if it has one)")

    add_template = add_chat_template_jinja = add_chat_template_path = add_chat_template

    def add_lr_scheduler_kwargs(self, name: str, value: Any) -> None:
        rate = float(self.theirs.settings.get("learning_rate") or math.nan)
        for key, number in value.items() if isinstance(value, dict) else [("", value)]:
            if key in ("min_lr_rate", "min_lr_ratio"):
                self.set("min_lr_ratio", float(number), f"{name}: {key}")
            elif key == "min_lr" and rate > 0:
                self.set("min_lr_ratio", float(number) / rate, f"{name}: {key} {number}")
            else:
                self.lose(f"{name}: {key} {number}", said_here(name))

    def add_report_to(self, name: str, value: Any) -> None:
        """One tracker: the first that is installed."""
        for tracker in value if isinstance(value, list) else [value]:
            if name in self.ours:
                self.lose(f"{name}: {tracker}", f"one tracker, {self.ours[name]}")
            elif tracker in ("none", *map(str, get_available_trackers())):
                self.set(name, tracker, f"{name}: {value}" if tracker != value else "")
            elif tracker in LOGGER_TYPE_TO_CLASS:
                self.lose(
                    f"{name}: {tracker}", f"not installed: pip install {tracker}, and --report_to {tracker}"
                )
            else:  # transformers' "all", or one that Accelerate does not know: no package to install
                self.lose(f"{name}: {tracker}", f"one tracker here, of {', '.join(LOGGER_TYPE_TO_CLASS)}")

    def add_model_type(self, name: str, value: str) -> None:
        if self.script == "train_pretrain.py" and not self.ours.get("model_name_or_path"):
            self.lose(
                f"{name}: {value}",
                "a new model: --config_name, a folder or a name on the Hub with a config.json",
            )
        else:
            self.nothing.append(f"{name}: {value}")

    def add_dataset_splits(self, name: str, value: list[str]) -> None:
        for split in value:
            flag = "dataset_train_split" if "train" in split else "dataset_eval_split"
            self.set(flag, split, name)

    def add_packing(self, name: str, value: Any) -> None:
        if self.script == "train_pretrain.py" and not value:
            self.lose(f"{name}: {value}", "documents fill rows one after another, cut at --max_length")
        elif self.script == "train_pretrain.py":
            self.nothing.append(f"{name}: {value} (documents fill the rows)")
        else:
            self.add_by_name(name, value)

    add_sample_packing = add_packing

    def add_reward_funcs(self, name: str, value: Any) -> None:
        """open-r1's names for TRL's; others are functions of a script."""
        here = []
        for one in value if isinstance(value, list) else [value]:
            ours = OF_OPEN_R1.get(one, one)
            is_known = ours in OF_TRL or ours == "exact_number" or Path(ours).exists()
            if re.fullmatch(r"\w+", ours) and not is_known:
                self.lose(f"{name}: {one}", "a function of a script: --reward_funcs file.py:function")
            else:
                here.append(ours)
                if ours != one:
                    self.nothing.append(f"{name}: {one} (TRL's {ours}, of another form perhaps)")
        if here:
            self.add_by_name(name, here)

    def add_target_modules(self, name: str, value: Any) -> None:
        if self.theirs.trainer == "unsloth" and isinstance(value, list) and "embed_tokens" in value:
            self.lose(f"{name}: embed_tokens", "unsloth trains it whole; it is frozen here")
            value = [module for module in value if module != "embed_tokens"]
        self.add_by_name(name, value)

    def add_max_length(self, name: str, value: int) -> None:
        if self.theirs.trainer == "LLaMA-Factory":
            self.lose(f"{name}: {value}", "of generation there; of training: cutoff_len")
        else:
            self.add_by_name(name, value)

    def add_push_to_hub(self, name: str, value: Any) -> None:
        """A first run should not fail for want of a login, nor publish anything."""
        if value:
            self.lose(
                f"{name}: {value}", "add push_to_hub: true and hub_model_id: OWNER/NAME once a run is good"
            )

    add_hub_model_id = add_push_to_hub

    def add_val_size(self, name: str, value: float) -> None:
        if float(value) < 1:
            self.set("eval_fraction", float(value), name)
        else:
            self.lose(f"{name}: {value}", "a number of rows; a share here: --eval_fraction 0.01")

    add_val_set_size = add_test_split_size = add_val_size

    def add_deepspeed(self, name: str, value: Any) -> None:
        stage = 3 if re.search("z(ero)?_?-?3|stage.{0,4}3", str(value), re.IGNORECASE) else 2
        self.launch_config = f"--config_file accelerate_configs/deepspeed_zero{stage}.yaml"
        self.nothing.append(f"{name}: {value} (by accelerate launch)")

    def add_num_processes(self, name: str, value: int) -> None:
        """Of torchrun or deepspeed."""
        self.nothing.append(f"{name}: {value} (by accelerate launch)")

    def add_steps_per_generation(self, name: str, value: int) -> None:
        """TRL counts micro-batches, here windows are counted; so in generation_batch_size completions."""
        given = self.theirs.settings
        window = given.get("gradient_accumulation_steps", 1)
        if name == "generation_batch_size":
            window *= given.get("per_device_train_batch_size", 8) * self.processes
        if "steps_per_generation" not in self.flags or value % window:
            self.lose(f"{name}: {value}", "--steps_per_generation counts windows here, of one process")
        else:
            self.set("steps_per_generation", value // window, f"{name}: {value}, in windows of one process")

    add_generation_batch_size = add_steps_per_generation

    def add_datasets(self, name: str, value: Any) -> None:
        """The sources of data, in any of their forms."""
        evaluation = name in ("eval_dataset", "test_datasets")
        flag = "eval_dataset_name" if evaluation else "dataset_name"
        if isinstance(value, dict) and "datasets" in value:  # the alignment-handbook's mixture
            self.add("test_split_size", value.get("test_split_size"))
            value = value["datasets"]
        elif isinstance(value, dict):  # its older form: {dataset: share}
            value = [{"id": path, "weight": weight} for path, weight in value.items()]
        elif isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        sources = []
        for item in value:
            if isinstance(item, str) and self.theirs.trainer == "LLaMA-Factory":
                item = self.known_to_llamafactory(item, flag)
            sources += [item] if isinstance(item, str) else self.sources_of(dict(item))
        for source in sources:
            if isinstance(source, dict) and "columns" in source:
                self.nothing += [f"{shown} (in {flag})" for shown in source["columns"].values()]
                source["columns"] = list(source["columns"])
        sources = [source["path"] if list(source) == ["path"] else source for source in sources]
        if sources:
            self.set(flag, sources, name)

    add_dataset = add_eval_dataset = add_train_dataset = add_test_datasets = add_datasets
    add_dataset_mixture = add_dataset_mixer = add_datasets

    def add_pretraining_dataset(self, name: str, value: Any) -> None:
        self.add_datasets(name, value)
        if self.theirs.settings.get("max_steps") and len(self.ours.get("dataset_name", [])) == 1:
            self.set("dataset_streaming", True, f"axolotl streams a {name}")

    def add_dataset_prompt_column(self, name: str, value: str) -> None:
        self.set("columns", [f"prompt={value}"], name)

    def add_dataset_dir(self, name: str, value: str) -> None:
        self.nothing.append(f"{name}: {value} (the names of dataset are looked up there)")

    def known_to_llamafactory(self, name: str, flag: str) -> Any:
        """A name of LLaMA-Factory's dataset_info.json as the entry there; any other one as it is."""
        folder = Path(self.theirs.settings.get("dataset_dir") or "data")
        info = read_file(folder / "dataset_info.json") if (folder / "dataset_info.json").exists() else {}
        if name not in info:
            if not Path(name).exists() and "/" not in name:
                self.lose(f"dataset: {name}", f"write its file or its name on the Hub in {flag}")
            return name
        entry = dict(info[name])
        file = entry.pop("file_name", None)
        entry["path"] = entry.pop("hf_hub_url", None)
        if file and not entry["path"]:
            entry["path"] = str(folder / file)
        entry["name"], entry["max_samples"] = entry.pop("subset", None), entry.pop("num_samples", None)
        columns = entry.pop("columns", None) or {}
        return entry | columns

    def sources_of(self, item: dict[str, Any]) -> list[Any]:
        """An entry of a list of datasets as sources of ours."""
        path = item.pop("path", None) or item.pop("id", None)
        name = item.pop("name", None) or item.pop("config", None)
        split, _, rows = str(item.pop("split", None) or "train").partition("[:")
        most = item.pop("max_samples", None)
        if rows.rstrip("]").isdigit():
            most = int(rows.rstrip("]"))
        elif rows:
            self.lose(f"{path}: split: {split}[:{rows}", "a number of rows here: max_samples")
        files = item.pop("data_files", None)
        if isinstance(files, dict):  # by split
            for other in sorted(files.keys() - {"train"}):
                self.lose(
                    f"data_files: {other}: {files[other]}", "--eval_dataset_name, if it is evaluated on"
                )
            files = files.get("train")
        paths = [path]
        if files and path in ("json", "csv", "parquet", "text"):
            paths = files if isinstance(files, list) else [files]
        elif path is None or path in ("json", "csv", "parquet", "text"):
            self.lose(f"a dataset: {path or quoted(item, 60, str)}", "its files are not written down")
            return []
        elif files and files not in (path, [path]):
            self.lose(f"{path}: data_files: {files}", "a source is a file, a folder, or a name on the Hub")
        if isinstance(item.get("type"), dict):
            item |= item.pop("type")
        columns: dict[str, str] = {}
        for key, value in item.items():
            columns |= self.renames_of(f"{path}: {key}: {quoted(value, 60, str)}", key, value)
        settings = {"name": name, "split": split, "max_samples": most, "columns": columns}
        usual = {"name": (None, "default"), "split": ("train",), "max_samples": (None,), "columns": ({},)}
        settings = {key: value for key, value in settings.items() if value not in usual[key]}
        return [{"path": path} | settings for path in paths]

    def renames_of(self, shown: str, key: str, value: Any) -> dict[str, str]:
        """Of a further entry of a dataset: {new=old: the entry}, if it names a column."""
        new = "text" if key == "prompt" and "pretrain" in self.script else COLUMNS.get(key)
        is_share = key in ("weight", "fraction")
        is_foreign = key == "type" and OWN_COLUMNS.match(str(value))
        if key in NAMES_IN_ROWS:
            is_foreign = not texts_in(value) <= KNOWN_NAMES
        if value is None or value is False or (is_share and value == 1):
            return {}
        if is_foreign:
            self.lose(shown, "other names than rows have here: docs/data.md, --columns new=old")
        elif key in (*BY_COLUMNS, *NAMES_IN_ROWS) or value in (new, "messages", "conversations"):
            self.nothing.append(f"{shown} (rows are read by their columns)")
        elif new:
            return {f"{new}={value}": shown}
        elif is_share:
            self.lose(shown, "a share of its rows; here max_samples of a source, a number")
        else:
            self.lose(shown, "rows are read by their columns (docs/data.md)")
        return {}


def exact_value(name: str, value: Any) -> Any:
    """What the table says of this value by name; None: nothing."""
    named = str(value).lower() in table().values.get(name, {})
    return value_here(name, value) if named else None


def texts_in(value: Any) -> set[str]:
    """The texts in a dictionary or a list, keys aside."""
    if isinstance(value, str):
        return {value}
    if isinstance(value, dict):
        value = list(value.values())
    texts = set()
    for part in value if isinstance(value, list) else []:
        texts |= texts_in(part)
    return texts


def same(ours: Any, theirs: Any) -> bool:
    """Whether a value means the same: 1e-4 in YAML is a text."""
    return (
        ours in (theirs, [theirs]) or str(ours) == str(theirs) or is_number(theirs) and ours == float(theirs)
    )


def is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def lacks_template(model: str | None) -> bool:
    """Whether the model's tokenizer can be read, and has no chat template."""
    from transformers import AutoTokenizer

    try:
        return not AutoTokenizer.from_pretrained(model).chat_template
    except Exception:  # not here, no network, or not for everyone
        return False


# --- writing ------------------------------------------------------------------------------------------------


def as_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def config_of(translation: Translation, start: str) -> str:
    """The text of our config."""
    lines = [f"# A config of {translation.theirs.trainer}, translated by tools/translate.py. To start it:"]
    lines += [f"#     {start}", ""]
    for name in translation.flags:
        if name in translation.ours:
            line = f"{name}: {as_yaml(translation.ours[name])}"
            comment = translation.comments.get(name)
            lines.append(f"{line:40}  # {comment}" if comment else line)
    lines += ["", *(f"# {line}" if line else "#" for line in report_of(translation))]
    return printable("\n".join(lines)) + "\n"


def report_of(translation: Translation) -> list[str]:
    """What is not in the config, and why."""
    lines = []
    if translation.lost:
        width = min(max(len(what) for what, _ in translation.lost), 50)
        lines += ["Not carried over:", *(f"    {what:{width}}  {why}" for what, why in translation.lost)]
    if translation.nothing:
        lines += ["", "Needs no setting here:", *(f"    {what}" for what in translation.nothing)]
    return [" ".join(line.split("\n")) for line in lines]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m tools.translate",
        usage="%(prog)s [--out FILE] FILE, or a command line",
        description="another trainer's settings as a config of ours",
        allow_abbrev=False,
    )
    parser.add_argument("--out", help="file to write (default: THEIRS_plainloop.yaml, here)")
    args, words = parser.parse_known_args(argv)
    if not words:
        parser.error("name a file, or write a command line")
    files = [
        word for word in words if Path(word).suffix in (".yaml", ".yml", ".json", ".py", ".ipynb", ".sh")
    ]
    out = Path(args.out or f"{Path(files[-1]).stem if files else 'translated'}_plainloop.yaml")
    if out.exists():
        raise UserError(f"{out} is there already: delete it, or name another by --out")
    translation = Translation(read(words), out)
    words = translation.launch()
    launcher = f"accelerate launch -q {words}" if words else "python"
    start = f"{launcher} {translation.script} --config {out}"
    for name, text in translation.files.items():
        out.with_name(name).write_text(text, encoding="utf-8")
    out.write_text(config_of(translation, start), encoding="utf-8")
    print("\n".join(map(printable, report_of(translation))))
    print(f"\n{out} is written: {len(translation.ours)} settings. Look at them, and start:\n    {start}")
    rows = translation.flags | translation.ours
    a_step = rows["per_device_train_batch_size"] * rows["gradient_accumulation_steps"]
    print(f"a step has {a_step} rows of each process")
    if not {"model_name_or_path", "config_name"} & translation.ours.keys():
        print("no model is named there: add --model_name_or_path")
    if "dataset_name" not in translation.ours:
        print("no data is named there: add --dataset_name FILE, or a dataset of the Hub")
        return
    # says what has no effect, or is wrong
    parse_args(translation.args_class, "", argv=["--config", str(out)])


if __name__ == "__main__":
    as_command(main)
