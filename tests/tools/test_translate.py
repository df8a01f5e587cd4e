"""Other trainers' settings as ours: hand-written configs of each, what they become, and that nothing is lost in
silence."""

import dataclasses
import importlib
import json
import re

from common.command_line import parse_args
from common.errors import UserError
from common.other_names import table
import pytest
import yaml

from tests.conftest import EXPERIMENTS, demo, module_of
from tools import translate

SCRIPTS = ["train_pretrain", "train_sft", "train_dpo", "train_grpo"]
OURS = set()
for module in [*SCRIPTS, *map(module_of, EXPERIMENTS)]:
    OURS |= {field.name for field in dataclasses.fields(importlib.import_module(module).Args)}

FACTORY = """
model_name_or_path: data/base_model
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 4
lora_target: q_proj,v_proj
dataset: mine,theirs
dataset_dir: {folder}
template: qwen3
cutoff_len: 200
preprocessing_num_workers: 2
dataloader_num_workers: 4
output_dir: {folder}/run
logging_steps: 10
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {{min_lr: 1.0e-5}}
warmup_ratio: 0.1
bf16: true
save_only_model: false
resume_from_checkpoint: null
val_size: 0.1
eval_strategy: epoch
optim: adamw_bnb_8bit
neftune_noise_alpha: 5
flux_capacitor: 1.21
"""
FACTORY_HERE = {
    "use_peft": True,
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_modules": ["q_proj", "v_proj"],
    "dtype": "bfloat16",
    "gradient_checkpointing": True,
    "max_length": 200,
    "dataset_num_proc": 2,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "num_train_epochs": 3,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "cosine",
    "min_lr_ratio": 0.1,
    "warmup_steps": 0.1,
    "eval_fraction": 0.1,
    "optim": "adamw_8bit",
    "eval_steps": 100,
    "overwrite_output_dir": False,
}
FACTORY_SAID = """\
dtype: bfloat16                           # the frozen model's, as LLaMA-Factory loads it; adapters are float32
num_train_epochs: 3                       # the default of LLaMA-Factory
min_lr_ratio: 0.1                         # lr_scheduler_kwargs: min_lr 1e-05
#     dataset: theirs             write its file or its name on the Hub in dataset_name
#     flux_capacitor: 1.21        not known here
#     dataset_dir: {folder} (the names of dataset are looked up there)
#     template: qwen3 (the tokenizer's own is used, if it has one)"""

AXOLOTL = """
base_model: data/base_model
rl: dpo
chat_template: llama3
datasets:
  - path: json
    data_files: [data/dpo/train.jsonl]
    type: chat_template.default
    field_chosen: better
    split: train[:50]
adapter: qlora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
sequence_len: 512
sample_packing: true
micro_batch_size: 2
num_epochs: 4
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
evals_per_epoch: 4
val_set_size: 5e-2
wandb_project:
special_tokens:
  pad_token: <|end_of_text|>
"""
AXOLOTL_HERE = {
    "dataset_name": ['{"path": "data/dpo/train.jsonl", "max_samples": 50, "columns": ["chosen=better"]}'],
    "use_peft": True,
    "load_in_4bit": True,
    "lora_r": 8,
    "max_length": 512,
    "packing": True,
    "per_device_train_batch_size": 2,
    "num_train_epochs": 4,
    "optim": "adamw_8bit",
    "learning_rate": 2e-4,
    "chat_template": None,
    "eval_fraction": 0.05,
}
AXOLOTL_SAID = """\
#     json: field_chosen: better (in dataset_name)
#     json: type: chat_template.default (rows are read by their columns)"""

HANDBOOK = """
model_name_or_path: data/base_model
torch_dtype: bfloat16
chat_template: "{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}"
dataset_mixture:
  datasets:
    - {id: data/sft, config: default, split: train, columns: [messages], weight: 1.0}
    - {id: data/more, config: small, weight: 0.5}
  test_split_size: 1000
bf16: true
gradient_checkpointing_kwargs: {use_reentrant: false}
max_seq_length: 256
report_to: [all, dvclive, none]
push_to_hub: true
hub_model_id: a-name
save_strategy: "no"
warmup_steps: 0
warmup_ratio: 0.03
"""
HANDBOOK_HERE = {
    "dtype": "bfloat16",
    "dataset_name": ["data/sft", '{"path": "data/more", "name": "small"}'],
    "train_on": "everything",
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0.03,
    "max_length": 256,
    "report_to": "none",
    "push_to_hub": False,
    "save_steps": 0,
}
HANDBOOK_SAID = """\
chat_template: {folder}/ours.jinja  # chat_template, which was written in the config
report_to: none                           # report_to: ['all', 'dvclive', 'none']
#     report_to: dvclive      not installed: pip install dvclive, and --report_to dvclive
#     push_to_hub: True       add push_to_hub: true and hub_model_id: OWNER/NAME once a run is good
#     test_split_size: 1000   a number of rows; a share here: --eval_fraction 0.01
#     data/more: weight: 0.5  a share of its rows; here max_samples of a source, a number"""

CONFIGS = {
    "LLaMA-Factory": (FACTORY, FACTORY_HERE, "train_sft.py", FACTORY_SAID),
    "axolotl": (AXOLOTL, AXOLOTL_HERE, "train_dpo.py", AXOLOTL_SAID),
    "TRL": (HANDBOOK, HANDBOOK_HERE, "train_sft.py", HANDBOOK_SAID),
}


@pytest.fixture
def translated(tmp_path, capsys, monkeypatch):
    """translated(*words): (the values that our script then has, the text of our config, what was printed)."""

    def run(*words):
        out = tmp_path / "ours.yaml"
        monkeypatch.setattr(translate, "get_available_trackers", list)
        translate.main(["--out", str(out), *map(str, words)])
        said = capsys.readouterr().out
        script = re.search(r"(?:launch .*|python) (\S+)\.py --config", said)[1].replace("/", ".")
        args = parse_args(importlib.import_module(script).Args, demo("sft"), argv=["--config", str(out)])
        return args, out.read_text(), said

    return run


@pytest.mark.parametrize("trainer", CONFIGS)
def test_a_config_of_theirs_is_one_of_ours(trainer, translated, tmp_path):
    text, expected, script, lines = CONFIGS[trainer]
    (tmp_path / "dataset_info.json").write_text(
        json.dumps({"mine": {"file_name": "m.json", "columns": {"prompt": "question"}}})
    )
    (tmp_path / "theirs.yaml").write_text(
        text.format(folder=tmp_path) if trainer == "LLaMA-Factory" else text
    )
    args, ours, said = translated(tmp_path / "theirs.yaml")
    assert {name: getattr(args, name) for name in expected} == expected
    assert script in said and "accelerate_configs/single_gpu.yaml" in said and f"config of {trainer}" in ours
    assert not set(lines.format(folder=tmp_path).splitlines()) - set(ours.splitlines())
    for name, value in yaml.safe_load((tmp_path / "theirs.yaml").read_text()).items():
        kept = name in yaml.safe_load(ours)
        assert value is None or kept or re.search(rf"#.*\b{name}\b", ours), f"{name} is lost in silence"
    if trainer == "LLaMA-Factory":
        mine = {"path": str(tmp_path / "m.json"), "columns": ["instruction=question"]}
        assert [json.loads(args.dataset_name[0]), args.dataset_name[1]] == [mine, "theirs"]
    if trainer == "TRL":
        assert "eos_token" in (tmp_path / "ours.jinja").read_text()
        assert args.chat_template.endswith("ours.jinja")
        assert "#     report_to: all          one tracker here, of aim, comet_ml, mlflow, " in ours


def test_a_command_line_is_read_as_a_config(translated):
    words = "trl grpo --model_name_or_path data/base_model --dataset_name data/grpo --num_generations=4 --use_peft"
    words += (
        " --reward_funcs think_format_reward mine.score --scale_rewards false --gradient_accumulation_steps 2"
    )
    words += (
        " --steps_per_generation 4 --lora_target_modules all-linear --max_completion_length 32 --bf16 False"
    )
    args, ours, said = translated(*words.split())
    assert args.reward_funcs == ["think_format_reward", "mine.score"] and args.scale_rewards == "none"
    assert (args.num_generations, args.steps_per_generation, args.use_peft) == (4, 2, True)
    assert (args.lora_dropout, args.max_completion_length) == (0.05, 32)
    assert "python train_grpo.py" in said  # without bf16, no launcher


SCRIPT = """from trl import SFTConfig
from unsloth_like import nothing
USE_LORA = False
common = dict(learning_rate=1e-4, num_train_epochs=2)
CFG = {"training": {"warmup_steps": 7}, "more": load()}
seeds = 3
seeds = seeds + 1
held_out = load_dataset("data/sft", split="validation")
data = load_dataset("data/sft", split="train")
args = SFTConfig("out", packing_strategy="bfd", dataset_text_field="text", seed=seeds, max_length=None, **common, **CFG["training"])
if __name__ == "__main__":
    args.packing = True
args.learning_rate = rate()
parser.add_argument("--decay", default=0.5)
a = parser.parse_args()
peft_config = LoraConfig(r=16) if USE_LORA else None
if USE_LORA:
    model = get_peft_model(model, peft_config)
trainer = SFTTrainer("data/base_model", args=args, train_dataset=data, eval_dataset=held_out, weight_decay=a.decay)
"""
TWO_TRAININGS = """
def load(name, **kwargs):
    return AutoModelForCausalLM.from_pretrained(name, **kwargs)
parser.add_argument("--lr", type=float, default=None)
args = parser.parse_args()
if args.lr is None:
    args.lr = 2e-4
data = load_dataset("data/sft")
peft_config = LoraConfig(r=4)
peft_config.lora_dropout = 0.25
sft_args = SFTConfig("out", learning_rate=args.lr, max_steps=9, **{"hub_token": "hf_S3CR3T"})
if args.debug:
    sft_args.max_steps = 5
dpo_args = DPOConfig(learning_rate=5e-6)
dpo_args.max_length = 77
SFTTrainer("data/base_model", args=sft_args, train_dataset=data, eval_dataset=data, report_to=None)
"""
REWARDED = """from trl.rewards import accuracy_reward
args = GRPOConfig(**settings(), beta=0.1)
trainer = GRPOTrainer("data/base_model", reward_funcs=[accuracy_reward, mine], train_dataset=load_dataset("data/grpo"))
"""
AXOLOTL_DATA = """base_model: data/base_model
datasets:
  - {path: a.json, type: alpaca}
  - {path: b.jsonl, type: alpaca, field_instruction: input, field_output: answer, fraction: 0.5}
  - {path: c.jsonl, type: chatml.intel, roles: {assistant: [agent]}, message_property_mappings: {role: from, content: value}}
"""
SOURCE_B = {"path": "b.jsonl", "columns": ["instruction=input", "output=answer"]}
NOT_LOST = [  # files, words, settings of ours, lines of our config
    (
        {"a.py": SCRIPT},
        "a.py",
        {"num_train_epochs": 2, "warmup_steps": 7, "packing": True, "use_peft": False, "weight_decay": 0.5}
        | {
            "dataset_train_split": "train",
            "eval_dataset_name": [{"path": "data/sft", "split": "validation"}],
        },
        ["seed=seeds", "learning_rate=rate()", "max_length: null", "completion_only_loss"]
        + ["packing_strategy: bfd\n", "dataset_text_field: text\n"],
    ),
    # the script that a command starts, with words for its own parser
    ({"a.py": SCRIPT}, "accelerate launch a.py --decay 0.25", {"packing": True, "weight_decay": 0.25}, []),
    (
        {"sft.py": TWO_TRAININGS},
        "python sft.py --lr 1e-5",
        {"learning_rate": 1e-5, "max_steps": -1, "num_train_epochs": 3, "dataset_name": ["data/sft"]}
        | {"max_length": 1024, "lora_r": 4, "lora_dropout": 0.25, "eval_dataset_name": None},
        [
            "max_steps=5",
            "AutoModelForCausalLM.from_pretrained: **kwargs=kwargs",
            "dpo_args.max_length = 77 ",
            "learning_rate=5e-06 ",
            "hub_token: (secret)",
        ],
    ),
    (
        {
            "a.py": 'R = ["accuracy_reward", "length:200"]\nGRPOTrainer("data/base_model", reward_funcs=R, train_dataset=load_dataset("x"))'
        },
        "a.py",
        {"reward_funcs": ["accuracy_reward", "length:200"]},
        [],
    ),
    (
        {
            "a.py": 'GRPOTrainer("data/base_model", reward_funcs=[f(1), "accuracy_reward"], train_dataset=load_dataset("x"))'
        },
        "a.py",
        {"reward_funcs": ["accuracy_reward"]},
        ["reward_funcs=[f(1), 'accuracy_reward']"],
    ),
    (
        {"a.py": 'changed = {"max_steps": 7}\nchanged["max_steps"] = 8\nargs = SFTConfig("out", **changed)'},
        "a.py --model_name_or_path data/base_model",
        {"max_steps": -1, "lr_scheduler_type": "cosine"},
        ["**changed=changed ", "computed in the script, so no defaults of TRL are written"],
    ),
    (
        {"a.py": REWARDED},
        "a.py",
        {"reward_funcs": ["accuracy_reward"], "beta": 0.1, "lr_scheduler_type": "constant"},
        ["**settings()=settings()", "reward_funcs: mine"],
    ),
    (
        {"a.yaml": "learning_rate: 2.0e-5\noutput_dir: out/base\ndataset_name: data/sft\nbf16: true"},
        "trl sft --learning-rate 1e-4 --output_dir out/hi --config a.yaml --no_gradient_checkpointing",
        {"learning_rate": 1e-4, "output_dir": "out/hi", "gradient_checkpointing": False},
        [],
    ),
    (
        {"a.yaml": "load_best_model_at_end: true\nmetric_for_best_model: eval_rewards/accuracies\nrl: dpo"},
        "a.yaml",
        {"save_best": "eval_rewards/accuracies"},
        [],
    ),
    (
        {"a.yaml": "loss_type: [sigmoid, bco_pair, sft]\nloss_weights: [0.8, 0.2, 1.5]\nrl: dpo"},
        "a.yaml",
        {"loss_type": ["sigmoid", "bco_pair"], "loss_weights": [0.8, 0.2], "sft_weight": 1.5},
        [],
    ),
    (
        {"a.yaml": AXOLOTL_DATA},
        "a.yaml",
        {"dataset_name": ["a.json", SOURCE_B, "c.jsonl"], "columns": None},
        [
            "b.jsonl: fraction: 0.5",
            "c.jsonl: type: chatml.intel",
            "c.jsonl: roles: {'assistant': ['agent']}",
            "b.jsonl: field_instruction: input (in dataset_name)",
            "c.jsonl: message_property_mappings: {'role': 'from', 'content': 'value'} (rows are",
        ],
    ),
    (
        {
            "d/dataset_info.json": '{"c4": {"file_name": "c4.json", "columns": {"prompt": "text"}}}',
            "a.yaml": "stage: pt\nmodel_name_or_path: data/base_model\ndataset: c4\ndataset_dir: FOLDER/d",
        },
        "a.yaml",
        {"columns": None},
        [],
    ),
    (
        {
            "a.yaml": "base_model: data/base_model\npretraining_dataset: [{path: data/pretrain, text_column: content}]"
        },
        "a.yaml",
        {"dataset_name": [{"path": "data/pretrain", "columns": ["text=content"]}]},
        [],
    ),
]


@pytest.mark.parametrize("files, words, settings, lines", NOT_LOST)
def test_nothing_is_lost_or_made_up_in_silence(files, words, settings, lines, translated, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.replace("FOLDER", str(tmp_path)))
    words = [str(tmp_path / word) if word in files else word for word in words.split()]
    args, ours, _ = translated(*words)
    assert "S3CR3T" not in ours
    found = {}
    for name in settings:
        value = getattr(args, name)
        if name.endswith("dataset_name") and value:
            value = [json.loads(item) if item.startswith("{") else item for item in value]
        found[name] = value
    assert found == settings
    assert not [line for line in lines if line not in ours], ours


@pytest.mark.parametrize(
    "cell",
    [
        "%%bash\npip install unsloth",
        'print(\n    "a: %d"\n    % n\n)\nassert (1\n    != 2)',
        "!pip install -q \\\n    unsloth trl\nx = 1",
        "if not here:\n    !pip install unsloth\nelse:\n    %pip install trl",
    ],
)
def test_the_commands_of_a_notebook_are_left_out(cell, translated, tmp_path):
    cells = [
        {"cell_type": "code", "source": text} for text in (cell, "%%time\nargs = SFTConfig(max_length=77)")
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    assert translated(tmp_path / "a.ipynb", "--dataset_name", "data/sft")[0].max_length == 77


def test_what_a_launcher_of_ones_own_would_do_is_told(translated):
    """The line to start has that launcher; what it would need for these settings is not done by itself."""
    words = "accelerate launch --num_processes 4 sft.py --bf16 --fsdp full_shard --dataset_name data/sft"
    _, ours, said = translated(*words.split())
    assert "accelerate launch -q --num_processes 4 train_sft.py" in said
    for word in ("--mixed_precision bf16", "fsdp2.yaml"):
        assert re.search(f"the launcher is yours.*{word}", ours)


def test_the_call_of_a_trainer_is_read(translated, tmp_path):
    """TRL's own quickstart; reward functions of the script are named as not carried over."""
    lines = """from trl import GRPOTrainer
def reward_len(completions, **kwargs): return [1.0] * len(completions)
dataset = load_dataset("data/grpo", split="train")
trainer = GRPOTrainer(model="data/base_model", reward_funcs=reward_len, train_dataset=dataset)
"""
    (tmp_path / "a.py").write_text(lines)
    args, ours, said = translated(tmp_path / "a.py")
    assert args.model_name_or_path == "data/base_model" and "train_grpo.py" in said
    assert re.search("reward_funcs: reward_len .*--reward_funcs file.py:function", ours + said)


def test_the_first_values_of_a_script_count(translated, tmp_path):
    """What follows often evaluates or tests the model. Names of folders may be made of others."""
    lines = """# or unsloth/SmolLM2
model_id, folder = "data/base_model", "runs"
files = {"train": "data/sft/train.jsonl", "test": "test.jsonl"}
train = load_dataset("json", data_files=files, split="train", token="hf_S3CR3T")
tokenizer = AutoTokenizer.from_pretrained(pick())
tokenizer = AutoTokenizer.from_pretrained("another_model")
peft_config = LoraConfig(bias="all")
held_out = load_dataset("data/dpo", split="test")
args = SFTConfig(f"{folder}/{model_id}", learning_rate=1e-4, max_steps=count())
model = AutoModelForCausalLM.from_pretrained(model_id, dtype="float32", token="hf_S3CR3T")
again = AutoModelForCausalLM.from_pretrained(model_id, dtype="auto", token="hf_S3CR3T_too")
"""
    (tmp_path / "a.py").write_text(lines)
    args, ours, _ = translated(tmp_path / "a.py")
    assert args.dataset_name == ["data/sft/train.jsonl"] and args.model_name_or_path == "data/base_model"
    assert (args.output_dir, args.learning_rate, args.dtype) == ("runs/data/base_model", 1e-4, "float32")
    assert args.tokenizer_name == "another_model" and "S3CR3T" not in ours
    assert all(lost in ours for lost in ("data_files: test: test.jsonl", "bias: all"))
    assert (
        re.search("load_dataset.*dpo.*a later value.*\n.*dtype=auto +a later", ours)
        and "config of TRL" in ours
    )
    assert "#     max_steps=count()  " in ours


@pytest.mark.parametrize(
    "words, named",
    [
        ("axolotl train a.yaml", r"rl: gdpo: there is no script for it here \(sft, dpo, orpo, grpo, kto"),
        ("b.py", r"no call in it configures a training \(.*Config, .*from_pretrained\)"),
    ],
)
def test_a_method_that_is_not_here_is_no_other_one(words, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("base_model: x\nrl: gdpo\ndatasets: [{path: y}]\n")
    (tmp_path / "b.py").write_text("print(1)")
    with pytest.raises(UserError, match=named):
        translate.main(words.split())


def test_variables_and_modules_of_a_command_line(translated, tmp_path):
    """The stage is in the name of the file alone."""
    file = tmp_path / "a_dpo.yaml"
    file.write_text("base_model: data/base_model\ndatasets: [{path: data/dpo, type: chat_template}]\n")
    words = f"LEVEL=info accelerate launch --num_processes 2 -m axolotl.cli.train {file}"
    args, _, said = translated(*words.split())
    assert args.dataset_name == ["data/dpo"] and "launch -q --num_processes 2 train_dpo.py" in said


def test_a_script_without_a_dataset_is_told_so(translated, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.py").write_text('trainer = SFTTrainer(model="data/base_model", train_dataset=data)')
    monkeypatch.chdir(tmp_path)
    translate.main(["a.py"])
    count = len(yaml.safe_load((tmp_path / "a_plainloop.yaml").read_text()))
    said = capsys.readouterr().out
    assert f"\na_plainloop.yaml is written: {count} settings. Look at them, and start:\n" in said
    assert "    python train_sft.py --config a_plainloop.yaml\n" in said and "no data is named there" in said


def test_a_launchers_config_of_a_known_name_is_the_one_here(translated):
    words = "accelerate launch --config_file examples/accelerate_configs/fsdp2.yaml grpo.py --dataset_name data/grpo"
    args, _, said = translated(*words.split(), "--dataset_prompt_column", "problem")
    assert "--config_file accelerate_configs/fsdp2.yaml train_grpo.py" in said
    assert args.columns == ["prompt=problem"]


def test_the_words_of_a_launcher_stay(translated):
    words = "accelerate launch --config_file theirs.yaml --num_processes 4 dpo.py --beta 0.5 --dataset_name data/dpo"
    args, _, said = translated(*words.split())
    assert "accelerate launch -q --config_file theirs.yaml --num_processes 4 train_dpo.py --config" in said
    assert args.beta == 0.5


def test_a_script_is_read_where_it_spells_out_its_values(translated, tmp_path):
    lines = """from unsloth import FastLanguageModel, is_bfloat16_supported
length = 128
model, tokenizer = FastLanguageModel.from_pretrained(model_name="data/base_model", max_seq_length=length)
model = FastLanguageModel.get_peft_model(model, r=8, use_gradient_checkpointing="unsloth", bias="none")
data = load_dataset("data/sft", split="train")
args = SFTConfig(learning_rate=2e-4, max_steps=7, bf16=is_bfloat16_supported(), output_dir=compute())
"""
    cells = [{"cell_type": "code", "source": ["%pip install unsloth\n", lines]}, {"cell_type": "markdown"}]
    for name, text in {"a.py": lines, "a.ipynb": json.dumps({"cells": cells})}.items():
        (tmp_path / name).write_text(text)
        args, ours, _ = translated(tmp_path / name)
        assert (args.use_peft, args.lora_r, args.lora_alpha, args.max_length) == (True, 8, 16, 128)
        assert (args.learning_rate, args.max_steps, args.optim) == (2e-4, 7, "adamw_8bit")
        assert args.dataset_name == ["data/sft"] and "single_gpu.yaml" in ours
        assert args.output_dir == "outputs/sft" and re.search(
            r"#     output_dir=compute\(\) +computed in the script", ours
        )
        (tmp_path / "ours.yaml").unlink()


def test_a_script_of_older_trl_is_read(translated, tmp_path):
    """Its trainers took the settings themselves; defaults of argparse and of dataclasses are values; what is
    computed has no default."""
    lines = """class ScriptArguments:
    strength: float = field(default=0.5, metadata={"help": "beta"})
parser.add_argument("--weight-decay", type=float, default=0.05)
args = parser.parse_args()
config = TrainingArguments("out", weight_decay=args.weight_decay, warmup_ratio=warm_up(), NEFT=None)
trainer = DPOTrainer("data/base_model", None, args=config, beta=script_args.strength, loss_type="ipo", dtype=torch.bfloat16,
                     peft_config=LoraConfig(lora_alpha=32), train_dataset=data, callbacks=[EarlyStoppingCallback(early_stopping_patience=3)])
"""
    (tmp_path / "a.py").write_text(lines)
    args, ours, said = translated(tmp_path / "a.py", "--eval_strategy", "no", "--eval_steps", "7")
    assert args.model_name_or_path == "data/base_model" and "train_dpo.py" in said
    assert (args.weight_decay, args.beta, args.loss_type, args.dtype) == (0.05, 0.5, ["ipo"], "bfloat16")
    assert (args.use_peft, args.lora_r, args.lora_alpha, args.lora_dropout) == (True, 8, 32, 0.0)
    assert re.search("target_modules: peft's choice +by the kind of model", ours)
    assert args.eval_steps == 0 and "#     eval_steps: 7 (the strategy is: no)\n" in ours
    assert "early_stopping_patience" in ours
    assert "warmup_steps" not in ours and "warmup_ratio=warm_up()" in ours


def test_evaluations_by_steps_are_as_often_as_lines_unless_they_say(translated):
    words = "accelerate launch dpo.py --evaluation_strategy steps --logging_steps 7 --dataset_name data/dpo"
    args, _, _ = translated(*words.split())
    assert args.eval_steps == 7  # transformers' default for it


def test_a_launcher_of_theirs_and_rewards_by_name(translated, tmp_path):
    words = "torchrun --nproc_per_node 2 grpo.py --fp16 --deepspeed z3.json --reward_funcs accuracy tag_count"
    words += " --generation_batch_size 64 --num_generations 4 --dataset_name data/grpo"
    args, ours, said = translated(*words.split())
    assert "deepspeed_zero3.yaml --mixed_precision fp16 --num_processes 2 train_grpo.py" in said
    assert args.reward_funcs == ["accuracy_reward"] and "reward_funcs: tag_count" in ours
    assert "#     reward_funcs: accuracy (TRL's accuracy_reward, of another form perhaps)\n" in ours
    assert "#     deepspeed: z3.json (by accelerate launch)\n#     num_processes: 2 (by acc" in ours
    assert args.steps_per_generation == 4  # of 8 completions on each of two processes
    assert "# generation_batch_size: 64, in windows of one process\n" in ours


def test_pretraining_has_their_weight_decay(translated, tmp_path):
    words = (
        "python run_clm.py --train_file a.txt --model_type gpt2 --learning_rate 1e-3 --packing false".split()
    )
    args, ours, said = translated(*words)
    assert "train_pretrain.py" in said and args.dataset_name == ["a.txt"] and "packing: False" in ours
    assert (args.weight_decay, args.adam_beta2) == (0.0, 0.999) and "model_type: gpt2  a new model" in ours
    assert "a step has 8 rows of each process" in said
    (tmp_path / "ours.yaml").unlink()
    (tmp_path / "a.yaml").write_text(
        "base_model: data/base_model\npretraining_dataset: data/pretrain\nmax_steps: 3\n"
    )
    args, ours, said = translated(tmp_path / "a.yaml")
    assert args.dataset_streaming and args.lr_scheduler_type == "cosine" and "train_pretrain.py" in said
    assert "# axolotl streams a pretraining_dataset\n" in ours


def test_a_config_of_torchtune_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("model: {_component_: torchtune.models.llama3.lora_llama3_8b}\n")
    with pytest.raises(UserError, match="^model: a component of torchtune"):
        translate.main(["--out", str(tmp_path / "ours.yaml"), str(tmp_path / "a.yaml")])


def test_a_shell_script_is_read_as_the_shell_does(translated, tmp_path):
    (tmp_path / "run.sh").write_text("""#!/bin/bash
# torchrun --nproc_per_node 2 src/train.py --learning_rate 1
export MODEL=data/base_model  # or another
OUT="$HOME/out of ${MODEL}"
RATE=${RATE:-2e-5}
python --version
CUDA_VISIBLE_DEVICES=0,1 torchrun --nnodes 1 --nproc_per_node 2 src/train.py \\
    --stage sft --model_name_or_path $MODEL --output_dir "$OUT" \\
    --learning_rate ${RATE} --bf16 --cutoff_len=${LENGTH:-77} --num_train_epochs $N --warmup_steps 5 $([[ -z "$N" ]] && echo "--fp16") \\
    --max_grad_norm $(nproc) --seed ${SEED:-${OTHER:-3}} --max_length 9 --report_to='none'& tee --append $OUT/log
echo done
""")
    quoted = "trl sft --model_name_or_path data/base_model --eos_token '<|im_end|>' --system \"a & b;\" "
    quoted += "--hub_token hf_S3CR3T --dataset_name data/sft --seed 7 > log"
    (tmp_path / "quoted.sh").write_text(quoted)
    args, ours, said = translated(tmp_path / "run.sh")
    assert (args.model_name_or_path, args.output_dir) == ("data/base_model", "outputs/sft")
    assert (args.learning_rate, args.max_length, args.warmup_steps, args.seed) == (2e-5, 77, 5, 3)
    for lost in (
        "output_dir=$HOME/out of data/base_model",
        "num_train_epochs=$N",
        "max_grad_norm=$computed",
        "max_length: 9",
    ):
        assert lost in ours, lost
    assert "num_train_epochs:" not in ours  # the default of LLaMA-Factory, 3, would be made up
    started = (
        "accelerate launch -q --config_file accelerate_configs/multi_gpu.yaml --num_processes 2 train_sft.py"
    )
    assert started in said
    (tmp_path / "ours.yaml").unlink()
    args, ours, said = translated(tmp_path / "quoted.sh")
    assert (args.dataset_name, args.seed) == (["data/sft"], 7) and "system: a & b;" in ours
    assert "eos_token: <|im_end|>" in ours and "S3CR3T" not in ours + said
    (tmp_path / "empty.sh").write_text("#!/bin/bash\nls *.py\n")
    expected = rf"^{tmp_path}/empty.sh: no command in it starts a training \(.*torchrun, .*axolotl"
    with pytest.raises(UserError, match=expected):
        translate.main([str(tmp_path / "empty.sh")])


@pytest.mark.parametrize(
    "word, line",
    [
        ("none.yaml", "^none.yaml: .*No such file"),
        ("broken.yaml", "^broken.yaml: while parsing a flow node"),
        ("list.yaml", "^list.yaml: expected `name: value` lines"),
        ("broken.py", "^the script cannot be read: line 1: invalid syntax"),
        ("words", "^words: .*No such file"),
    ],
)
def test_what_cannot_be_read_is_one_line(word, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "list.yaml").write_text("- a")
    (tmp_path / "broken.py").write_text("def")
    with pytest.raises(UserError, match=line):
        translate.main([word])
    assert not list(tmp_path.glob("*plainloop*"))


def test_a_config_is_not_written_over(tmp_path):
    (tmp_path / "ours.yaml").write_text("mine")
    with pytest.raises(UserError, match=f"^{tmp_path}/ours.yaml is there already: delete"):
        translate.main(["--out", str(tmp_path / "ours.yaml"), "sft", "--bf16"])


def test_the_table_names_settings_that_exist():
    names, values, defaults = table()
    for name, here in names.items():
        assert set(re.findall(r"--(\w+)", here)) <= OURS | {"config_file", "mixed_precision"}, (name, here)
    common = set.intersection(
        *(
            {field.name for field in dataclasses.fields(importlib.import_module(script).Args)}
            for script in SCRIPTS
        )
    )
    assert not common & names.keys()  # never reached
    for choices in [*values.values(), defaults]:
        for settings in choices.values():
            assert isinstance(settings, str) or settings.keys() <= OURS | {"launch", "script"}, settings
