"""Each mistake of a user is one line that names the flag, file or row, exit code 1, and no traceback."""

import importlib.util
import json

from common.errors import UserError
import pytest

from tests.conftest import read_metrics

CHAT = {"messages": [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "Answer: 2"}]}
MODEL = "--model_name_or_path data/base_model --eval_steps 0"
SFT = (
    f"--config data/configs/sft.yaml {MODEL} --max_steps 2 --per_device_train_batch_size 2 --save_steps 0 --logging_steps 1"
)
DPO = f"{MODEL} --dataset_name data/dpo --max_steps 2"
GRPO = f"--config data/configs/grpo.yaml {MODEL} --max_steps 1 --per_device_train_batch_size 8"
ONE = f"{GRPO} --reward_weights 1 --reward_funcs"
REWARDS = """
def fails(completions, **kw): return [1 / 0 for _ in completions]
def short(completions, **kw): return [1.0]
def nan(completions, **kw): return [float('nan') for _ in completions]
def none(completions, **kw): return [None for _ in completions]
"""
# What is started, in a folder with the files below, and what its one line names.
TABLE = [
    ("sft", "--learning_rat 1", "--learning_rate"),
    ("sft", "--learning_rate fast", "--learning_rate"),
    ("sft", "--config nowhere.yaml", "nowhere.yaml"),
    ("sft", f"{SFT} --train_on some", "--train_on"),
    ("sft", f"{SFT} --dtype int8", "--dtype"),
    ("sft", f"{SFT} --turn_dropping 0.5 --train_on last_turn", "--turn_dropping"),
    ("sft", f"{SFT} --eval_reward_funcs exact_nmber", "--eval_reward_funcs"),
    ("sft", f"{SFT} --eval_prompts nowhere.jsonl", "nowhere.jsonl"),
    ("sft", f"{SFT} --early_stopping_patience 2", "--save_best"),
    ("sft", f"{SFT} --report_to nothing", "nothing"),
    ("sft", f"{SFT} --report_to swanlab", "swanlab"),
    ("sft", f"{SFT} --dataset_name nowhere.jsonl", "nowhere.jsonl"),
    ("sft", f"{SFT} --dataset_name empty.jsonl", "empty.jsonl"),
    ("sft", f"{SFT} --dataset_name columns.jsonl", "columns.jsonl:1"),
    ("sft", f"{SFT} --dataset_name questions.jsonl", "questions"),
    ("sft", f"{SFT} --dataset_name data/sft --dataset_streaming --max_steps -1", "--max_steps"),
    ("sft", f"{SFT} --model_name_or_path no/such-model", "no/such-model"),
    ("pretrain", "--dataset_name texts.jsonl --use_peft --max_length 64", "--model_name_or_path"),
    ("dpo", f"{DPO} --loss_type kto", "--loss_type"),
    ("dpo", f"{DPO} --loss_type ipo --label_smoothing 0.1", "--label_smoothing"),
    ("dpo", f"{DPO} --loss_weights 0.8 0.2", "--loss_weights"),
    ("dpo", f"{DPO} --dataset_streaming --precompute_ref_log_probs", "--dataset_streaming"),
    ("dpo", f"{DPO} --dataset_name columns.jsonl", "columns.jsonl"),
    ("grpo", f"{GRPO} --dataset_name columns.jsonl", "columns.jsonl"),
    ("grpo", f"{GRPO} --num_generations 1", "--num_generations"),
    ("grpo", f"{GRPO} --num_generations 3", "num_generations 3"),
    ("grpo", f"{GRPO} --loss_type cispo --epsilon_high 0.28", "--epsilon_high"),
    ("grpo", f"{GRPO} --temperature 0", "--temperature"),
    ("grpo", f"{GRPO} --reward_weights 1 2 3", "--reward_weights"),
    ("grpo", f"{ONE} rewards.py:fails", "fails"),
    ("grpo", f"{ONE} rewards.py:short", "short"),
    ("grpo", f"{ONE} rewards.py:nan", "nan"),
    ("grpo", f"{ONE} rewards.py:none", "None"),
    ("grpo", f"{ONE} rewards.py:absent", "absent"),
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def files(tmp_path):
    """words(text): its words, with the files below at their places."""
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "rewards.py").write_text(REWARDS)
    write(tmp_path / "columns.jsonl", [{"question": "1+1?", "solution": "2"}])
    write(tmp_path / "questions.jsonl", [{"messages": CHAT["messages"][:1]}])
    write(tmp_path / "texts.jsonl", [{"text": "one two three " * 30}] * 8)

    def words(text):
        return [str(tmp_path / word) if (tmp_path / word.split(":")[0]).exists() else word for word in text.split()]

    return words


@pytest.mark.parametrize(("stage", "text", "named"), TABLE, ids=[f"{stage} {text[-40:]}" for stage, text, _ in TABLE])
def test_a_mistake_is_one_line_that_names_it(stage, text, named, launch, files):
    with pytest.raises(UserError) as error:
        launch(stage, *files(text))
    assert "\n" not in str(error.value) and named in str(error.value), error.value


LAUNCHES = {
    "FSDP": {"ACCELERATE_USE_FSDP": "true"},  # Accelerate leaves it out on a CPU, in silence
    "DeepSpeed": {"ACCELERATE_USE_DEEPSPEED": "true"},
    # What `accelerate launch --cpu --num_processes 2` sets.
    "cpu_ddp.yaml": {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_MIXED_PRECISION": "no"},
}


@pytest.mark.parametrize("named", LAUNCHES)
def test_a_launch_that_is_not_what_it_seems_is_refused(named, launch, monkeypatch):
    if named == "DeepSpeed" and importlib.util.find_spec("deepspeed"):
        pytest.skip("deepspeed is installed")
    for name, value in LAUNCHES[named].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=named):
        launch("sft", *SFT.split())


def test_rows_without_a_trained_token_are_left_out_and_counted(launch, tmp_path, capsys):
    long = {"messages": [{"role": "user", "content": "1+1=2. " * 200}, CHAT["messages"][1]]}
    data = write(tmp_path / "some.jsonl", [CHAT, {"messages": CHAT["messages"][:1]}, long])
    output = launch("sft", *SFT.split(), "--dataset_name", data)
    assert capsys.readouterr().out.count("1 of 3 rows of some left out") == 2
    (source,) = json.loads((output / "dataset.json").read_text())["sources"]
    assert source["examples"] == 1 and sum(found["count"] for found in source["dropped"].values()) == 2
    assert len([row for row in read_metrics(output) if "loss" in row]) == 2
