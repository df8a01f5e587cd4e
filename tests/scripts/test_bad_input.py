"""Each mistake of a user is one line that names the flag, file or row, exit code 1, and no traceback."""

import json

from common.errors import UserError
import pytest

from tests.conftest import read_metrics, teacher, write_rows

CHAT = {
    "messages": [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "Answer: 2"}]
}
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
LABELLED = {"prompt": "1+1=", "completion": "2", "label": True}
LONG = {"messages": [{"role": "user", "content": "1+1=2. " * 200}, CHAT["messages"][1]]}
MODEL = "--model_name_or_path data/base_model --eval_steps 0"
SFT = f"--config data/configs/sft.yaml {MODEL} --max_steps 2 --per_device_train_batch_size 2 --save_steps 0 --logging_steps 1"
DPO = f"{MODEL} --dataset_name data/dpo --max_steps 2"
GRPO = f"--config data/configs/grpo.yaml {MODEL} --max_steps 1 --per_device_train_batch_size 8"
ONE = f"{GRPO} --reward_weights 1 --reward_funcs"
# whose folder is another each time
DISTILL = f"{MODEL} --max_steps 1 --lmbda 0.5 --teacher_model_name_or_path TEACHER"
REWARDS = """
def fails(completions, **kw): return [1 / 0 for _ in completions]
def short(completions, **kw): return [1.0]
def nan(completions, **kw): return [float('nan') for _ in completions]
def none(completions, **kw): return [None for _ in completions]
"""
# What is started, in a folder with the files below, and what its one line names.
TABLE = [
    ("sft", f"{SFT} --turn_dropping 0.5 --train_on last_turn", "--turn_dropping"),
    ("sft", f"{SFT} --eval_reward_funcs exact_nmber", "--eval_reward_funcs"),
    ("sft", f"{SFT} --eval_prompts nowhere.jsonl", "nowhere.jsonl"),
    ("sft", f"{SFT} --early_stopping_patience 2", "--save_best"),
    ("sft", f"{SFT} --report_to nothing", "nothing"),
    ("sft", f"{SFT} --report_to swanlab", "swanlab: pip install it, if it is one of aim, comet_ml, mlflow, "),
    ("sft", f"{SFT} --dataset_name nowhere.jsonl", "nowhere.jsonl"),
    ("sft", f"{SFT} --dataset_name empty.jsonl", "empty.jsonl"),
    ("sft", f"{SFT} --dataset_name columns.jsonl", "columns.jsonl:1"),
    ("sft", f"{SFT} --dataset_name questions.jsonl", "questions"),
    ("sft", f"{SFT} --dataset_name data/sft --dataset_streaming --max_steps -1", "--max_steps"),
    (
        "sft",
        f"{SFT} --dataset_name data/sft data/grpo --dataset_streaming --max_steps 1",
        "--dataset_weights",
    ),
    ("sft", f"{SFT} --model_name_or_path no/such-model", "no/such-model"),
    ("sft", f"{SFT} --eval_dataset_name long.jsonl --max_length 4096", "the model has 512 positions"),
    ("sft", f"{SFT} --dataset_name no/such-data", "no file or folder here"),
    ("pretrain", "--dataset_name texts.jsonl --use_peft --max_length 64", "--model_name_or_path"),
    ("dpo", f"{DPO} --loss_type ipo --label_smoothing 0.1", "--label_smoothing"),
    ("dpo", f"{DPO} --loss_weights 0.8 0.2", "--loss_weights"),
    ("dpo", f"{DPO} --dataset_streaming --precompute_ref_log_probs", "--dataset_streaming"),
    (
        "grpo",
        f"{GRPO} --num_generations 3",
        "generations 3 does not divide the 8 completions of a step (per_device_train_batch_size 8 x gradient_accumulation_steps 1 x 1 processes)",
    ),
    ("grpo", f"{GRPO} --loss_type cispo --epsilon_high 0.28", "--epsilon_high"),
    ("grpo", f"{GRPO} --loss_type cispo", "--epsilon_high"),
    ("grpo", f"{GRPO} --temperature 0", "--temperature"),
    ("grpo", f"{GRPO} --save_best reward --eval_steps 3 --num_iterations 2", "multiple of steps_per"),
    ("grpo", f"{GRPO} --reward_weights 1 2 3", "--reward_weights"),
    ("grpo", f"{ONE} rewards.py:fails", "fails"),
    ("grpo", f"{ONE} rewards.py:short", "short"),
    ("grpo", f"{ONE} rewards.py:nan", "nan"),
    ("grpo", f"{ONE} rewards.py:none --max_steps 30", "None"),
    ("grpo", f"{ONE} rewards.py:absent", "absent"),
    ("grpo", f"{ONE} exact_number --columns solution=answer --dry_run", "--columns answer=solution"),
    ("online_dpo", "--num_generations 4", "--num_generations"),
    ("online_dpo", "--beta 0", "--beta"),
    ("online_dpo", "--per_device_train_batch_size 3", "even batches"),
    ("kto", f"{MODEL} --dataset_name pairs.jsonl", "label"),
    ("kto", f"{MODEL} --per_device_train_batch_size 1", "--per_device_train_batch_size"),
    # it would be its own mismatched pair
    ("kto", f"{MODEL} --dataset_name labelled.jsonl --eval_fraction 0", "more rows"),
    ("reward", f"{MODEL} --dataset_name pairs.jsonl --objective regression", "messages"),
    ("reward", f"{MODEL} --dataset_name labelled.jsonl", "prompt + chosen + rejected"),
    ("reward", f"{MODEL} --dataset_name pairs.jsonl --use_peft", "--merge_lora"),
    ("distill", f"{MODEL} --dataset_name data/sft", "--teacher_model_name_or_path"),
    ("distill", f"{DISTILL} --teacher_model_name_or_path nowhere --lmbda 1", "nowhere"),
    ("distill", f"{DISTILL} --dataset_name data/grpo", "'prompt'"),
    ("distill", f"{DISTILL} --dataset_name data/sft --system_prompt Short", "--system_prompt"),
    (
        "rft",
        f"{MODEL} --max_completion_length 4 --max_train_samples 4 --reward_threshold 9",
        "--reward_threshold",
    ),
    ("rft", f"{MODEL} --eval_fraction 0.2", "--eval_dataset_name"),
]


@pytest.fixture
def files(tmp_path):
    """words(text): its words, with the files below at their places."""
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "rewards.py").write_text(REWARDS)
    write_rows(tmp_path / "columns.jsonl", [{"question": "1+1?", "solution": "2"}])
    write_rows(tmp_path / "questions.jsonl", [{"messages": CHAT["messages"][:1]}])
    write_rows(tmp_path / "long.jsonl", [LONG])
    write_rows(tmp_path / "pairs.jsonl", [PAIR] * 4)
    write_rows(tmp_path / "labelled.jsonl", [LABELLED])
    write_rows(tmp_path / "texts.jsonl", [{"text": "one two three " * 30}] * 8)

    def words(text):
        found = text.replace("TEACHER", teacher()).split()
        return [str(tmp_path / word) if (tmp_path / word.split(":")[0]).exists() else word for word in found]

    return words


@pytest.mark.parametrize(
    ("stage", "text", "named"), TABLE, ids=[f"{stage} {text[-40:]}" for stage, text, _ in TABLE]
)
def test_a_mistake_is_one_line_that_names_it(stage, text, named, launch, files):
    with pytest.raises(UserError) as error:
        launch(stage, *files(text))
    assert "\n" not in str(error.value) and named in str(error.value), error.value


LAUNCHES = {
    "ACCELERATE_USE_FSDP=true has no effect here": {
        "ACCELERATE_USE_FSDP": "true"
    },  # Accelerate leaves it out on a CPU, in silence
    # What `accelerate launch --cpu --num_processes 2` sets.
    "fp16 on a CPU": {"ACCELERATE_MIXED_PRECISION": "fp16"},
    "cpu_ddp.yaml": {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_MIXED_PRECISION": "no"},
}


@pytest.mark.parametrize("named", LAUNCHES)
def test_a_launch_that_is_not_what_it_seems_is_refused(named, launch, monkeypatch):
    for name, value in LAUNCHES[named].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=named):
        launch("sft", *SFT.split())


@pytest.mark.parametrize(
    "name", ["me:geheim@{}", ":geheim@{}", "geheim@{}", "me:ge@heim@{}", "{}/?key=geheim"]
)
def test_a_password_is_neither_shown_nor_written(name, launch, tmp_path):
    words = f"{GRPO} --rollout_server http://{name.format('127.0.0.1:8000')}".split()
    with pytest.raises(UserError, match="--rollout_server: an address with a password") as error:
        launch("grpo", *words)
    assert "heim" not in str(error.value)
    assert not any("heim" in path.read_text() for path in tmp_path.rglob("*.yaml"))


UNUSABLE = {  # flags, a good row, and bad ones
    "sft": (SFT, CHAT, [{"messages": CHAT["messages"][:1]}, LONG]),
    "kto": (
        "--loss_type apo_zero_unpaired",
        LABELLED,
        [LABELLED | {"label": "good"}, LABELLED | {"completion": ""}],
    ),
    "reward": ("--max_length 100", PAIR, [PAIR | {"margin": "wide"}, PAIR | {"chosen": "2 " * 99}]),
    "distill": (f"{DISTILL} --max_completion_length 4", CHAT, [{"messages": CHAT["messages"][:1]}]),
}


@pytest.mark.parametrize("stage", UNUSABLE)
def test_rows_that_cannot_be_used_are_left_out_and_counted(stage, launch, files, tmp_path, capsys):
    flags, good, bad = UNUSABLE[stage]
    data = write_rows(tmp_path / "some.jsonl", [good, *bad, good])
    words = f"{MODEL} {flags} --max_steps 2 --per_device_train_batch_size 2 --save_steps 0 --logging_steps 1"
    output = launch(stage, *files(words), "--dataset_name", data)
    said, size = capsys.readouterr().out, 2 + len(bad)
    assert sum(said.count(f"1 of {size} {what} left out") for what in ("rows of some", "prompts")) == len(bad)
    assert len([row for row in read_metrics(output) if "loss" in row]) == 2
    if stage != "distill":
        (source,) = json.loads((output / "dataset.json").read_text())["sources"]
        assert source["examples"] == 2 and sum(found["count"] for found in source["dropped"].values()) == len(
            bad
        )
