"""See it before you train: --dry_run says what a run would be and writes nothing in its folder; dataset.json
keeps it."""

import json

from common.run.dry_run import show_facts
import numpy as np
import pytest

from tests.conftest import read_metrics, write_rows

BASE = [
    "--model_name_or_path",
    "data/base_model",
    "--eval_prompts",
    "",
    *"--num_samples 0 --save_steps 0".split(),
]
STAGES = {
    stage: [
        "--config",
        f"data/configs/{stage}.yaml",
        *BASE,
        *"--max_train_samples 40 --max_eval_samples 10".split(),
    ]
    for stage in ("pretrain", "sft", "dpo", "grpo")
}
CHATS = [
    [("user", "How much is 1+1?"), ("assistant", "2")],
    [("user", "How much is 1+2?"), ("assistant", "3"), ("user", "And 2+2?"), ("assistant", "Answer: 4")],
    [("user", "A question without an answer")],
    [("user", "An empty answer"), ("assistant", "")],
    [("user", "Another empty answer"), ("assistant", " ")],
]


def write_chats(path, chats):
    rows = [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in chats]
    return write_rows(path, rows)


@pytest.mark.parametrize("stage", STAGES)
def test_a_dry_run_shows_everything_and_leaves_the_output_folder_alone(stage, launch, capsys):
    output = launch(stage, *STAGES[stage], "--dry_run")
    said = capsys.readouterr().out
    assert not output.exists()
    assert f"source: {stage}\n" in said and "rows: 40\n  examples: 40" in said
    for word in "eval_sources p50 #### steps_per_epoch 381,600 activations dry".split():
        assert word in said, word
    assert "reference model " not in said  # the demo of DPO computes its log-probabilities before
    assert said.count("with what is trained marked") == {"grpo": 0, "dpo": 2}.get(stage, 1)
    assert "[[" in said or stage == "grpo"


@pytest.mark.parametrize(("words", "needs_another"), [("", True), ("--use_peft", False)])
def test_a_dry_run_of_grpo(words, needs_another, launch, capsys):
    """12 of 40 prompts give 6 updates. The reference of an adapter is the model itself."""
    words += " --dry_run --beta 0.1 --per_device_train_batch_size 16 --num_generations 4"
    words += " --steps_per_generation 3 --num_iterations 2"
    launch("grpo", *STAGES["grpo"], *words.split())
    said = capsys.readouterr().out
    assert ("reference model " in said) == needs_another
    assert "examples_per_step: 2.0" in said and "steps_per_epoch: 24" in said


def test_a_dry_run_does_not_touch_a_run_that_is_there(launch, capsys):
    output = launch("sft", *STAGES["sft"], "--max_steps", "2")
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    launch("sft", *STAGES["sft"], "--dry_run", "--overwrite_output_dir", "--learning_rate", "1")
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_the_facts_of_a_run_are_in_dataset_json(launch, tmp_path, capsys):
    some = write_chats(tmp_path / "some.jsonl", CHATS)
    words = [*STAGES["sft"], "--dataset_name", some, *"data/sft --dataset_weights 0.1 0.3 --packing".split()]
    output = launch(
        "sft", *words, "--max_length", "128", "--max_steps", "2", "--per_device_train_batch_size", "2"
    )
    facts = json.loads((output / "dataset.json").read_text())
    first, second = facts["sources"]
    assert (first["source"], first["columns"], first["rows"], first["examples"]) == (
        "some",
        ["messages"],
        5,
        2,
    )
    assert first["dropped"] == {
        "empty answer": {"count": 2, "first": [f"{some}:4", f"{some}:5"]},
        "no assistant turn": {"count": 1, "first": [f"{some}:3"]},
    }
    assert (second["source"], second["rows"], second["examples"], second["dropped"]) == ("sft", 40, 40, {})
    assert [found["share"] for found in facts["sources"]] == pytest.approx([0.25, 0.75])
    assert 0 < first["trained_tokens"] < first["tokens"]
    packing, lengths = facts["packing"], facts["lengths"]
    tokens = first["tokens"] + second["tokens"]
    assert (
        packing["utilisation"] == pytest.approx(tokens / (packing["rows"] * 128))
        and packing["utilisation"] > 0.7
    )
    lows, highs, counts = zip(*lengths["histogram"], strict=True)
    assert lengths["mean"] == pytest.approx(tokens / 42) and sum(counts) == 42
    assert (lows[0], highs[-1]) == (lengths["min"], lengths["max"])
    assert lows[1:] == tuple(high + 1 for high in highs[:-1])
    assert facts["plan"]["steps"] == 2 and facts["model"]["parameters"] == {"trained": 381600, "all": 381600}
    lengths["histogram"] = [[1, 9, 20], [10, 1200, 1000]]
    show_facts(facts)
    bars = f"          1 - 9       #{' ' * 39} 20\n         10 - 1,200   {'#' * 40} 1,000\n"
    assert capsys.readouterr().out.endswith(bars)


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_each_source_has_its_own_evaluation_loss_beside_the_weighted_mean(stage, launch):
    data = f"data/{stage}"
    words = [
        *STAGES[stage],
        "--dataset_name",
        data,
        f"{data}/validation.jsonl",
        "--dataset_weights",
        "3",
        "1",
    ]
    words += "--eval_fraction 0.3 --max_steps 1 --eval_steps 1 --max_eval_samples 12".split()
    row = next(row for row in read_metrics(launch(stage, *words)) if "eval_loss" in row)
    own = [row[f"eval_{name}_loss"] for name in (stage, "validation")]
    # At the first step all preference losses are ln 2.
    assert row["eval_loss"] == pytest.approx(np.average(own, weights=[3, 1]), rel=1e-6)
    assert own[0] != own[1] or stage == "dpo"
