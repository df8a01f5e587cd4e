"""Each script, launched as a user launches it, learns on the embedded demo and leaves behind what the README says."""

import json
import shutil
import sys

from tests.conftest import ROOT, demo, read_metrics, run_script

import pytest
import torch
import yaml

# script -> (arguments that make the demo short, what must have happened between the first and the last evaluation)
RUNS = {
    "pretrain": (
        ["--max_steps", "100", "--eval_steps", "100"],
        lambda a, b: b["eval_perplexity"] < a["eval_perplexity"] / 50,
    ),
    "sft": (["--max_steps", "120", "--eval_steps", "120"], lambda a, b: b["eval_loss"] < 0.5 < 3 < a["eval_loss"]),
    "dpo": (
        ["--max_steps", "30", "--eval_steps", "30", "--max_eval_samples", "60"],
        lambda a, b: (
            b["eval_rewards/accuracies"] > 0.85 and b["eval_rewards/margins"] > 1 and abs(a["eval_rewards/margins"]) < 1e-5
        ),
    ),
    "grpo": (
        ["--config", "data/configs/grpo_zero.yaml", "--max_steps", "16", "--eval_steps", "16"],
        lambda a, b: b["eval_exact_number"] > a["eval_exact_number"] + 0.1,
    ),
}
LEFT = {"model.safetensors", "config.json", "tokenizer.json", "metrics.jsonl", "samples.jsonl", "args.yaml", "summary.json"}
LEFT |= {"report.html", "events.jsonl", "generation_config.json"}
TRAINED = {
    "pretrain": {"mean_token_accuracy", "entropy"},
    "sft": {"mean_token_accuracy", "entropy"},
    "dpo": {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"},
    "grpo": {"reward", "reward_std", "rewards/exact_number/mean", "rewards/regex/mean", "frac_reward_zero_std", "entropy"}
    | {"clip_ratio/region_mean", "completions/mean_length", "completions/clipped_ratio", "sampling/logp_difference"},
}


@pytest.mark.parametrize("stage", [s if s in ("sft", "grpo") else pytest.param(s, marks=pytest.mark.slow) for s in RUNS])
def test_a_script_learns_and_leaves_everything_behind(stage, tmp_path):
    arguments, learned = RUNS[stage]
    launcher = [sys.executable, "-m", "accelerate.commands.launch"] if stage == "sft" else [sys.executable]
    command = [*launcher, f"train_{stage}.py", *arguments, "--output_dir", str(tmp_path / "out")]
    run = run_script(command)
    assert run.returncode == 0, run.stderr[-6000:]
    assert "eval:" in run.stdout and "saved in" in run.stdout and "try next:" in run.stdout and "->" in run.stdout

    output = tmp_path / "out"
    assert LEFT | {f"train_{stage}.py"} <= {path.name for path in output.iterdir()}
    evaluations = [row for row in read_metrics(output) if any(name.startswith("eval_") for name in row)]
    assert learned(evaluations[0], evaluations[-1]), evaluations
    logged = [row for row in map(json.loads, (output / "metrics.jsonl").open()) if "loss" in row]
    always = {"step", "loss", "grad_norm", "learning_rate", "num_tokens", "tokens_per_second"}
    assert all(always | TRAINED[stage] <= row.keys() for row in logged)
    assert [row["step"] for row in logged] == sorted({row["step"] for row in logged})
    sample = json.loads((output / "samples.jsonl").read_text().splitlines()[0])
    assert {"step", "prompt", "completion", "temperature"} <= sample.keys()
    assert yaml.safe_load((output / "args.yaml").read_text())["output_dir"] == str(output)
    if stage == "grpo":
        row = json.loads((output / "completions.jsonl").read_text().splitlines()[0])
        assert {"step", "prompt", "completion", "rewards", "advantage"} <= row.keys()


def test_defaults_chain_from_stage_to_stage_and_say_so(tmp_path, monkeypatch, capsys):
    from common.args import CommonArgs
    from common.command_line import parse_args

    def choose_model(named, default_model):
        words = ["--model_name_or_path", named] if named else []
        return parse_args(CommonArgs, "nowhere.yaml", default_model, ["--dataset_name", "d", *words]).model_name_or_path

    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "data" / "base_model", "data/base_model")
    assert choose_model("mine", "outputs/sft") == "mine"
    assert choose_model(None, "outputs/sft") == "data/base_model" and "ships here" in capsys.readouterr().out
    (tmp_path / "outputs" / "sft").mkdir(parents=True)
    assert choose_model(None, "outputs/sft") == "data/base_model"  # a run that has not finished is not taken
    (tmp_path / "outputs" / "sft" / "summary.json").write_text("{}")
    assert choose_model(None, "outputs/sft") == "outputs/sft" and "outputs/sft" in capsys.readouterr().out


def test_lora_and_gradient_checkpointing_run_in_every_stage(launch, tmp_path):
    """The adapter is what is saved; DPO's reference is the model without it (ln 2 at the first step)."""
    pytest.importorskip("peft")
    few = [
        "--max_steps",
        "2",
        "--logging_steps",
        "1",
        "--eval_steps",
        "0",
        "--save_steps",
        "1",
        "--use_peft",
        "--lora_r",
        "4",
    ]
    few += [
        "--model_name_or_path",
        "data/base_model",
        "--gradient_checkpointing",
        "--eval_prompts",
        "",
        "--max_train_samples",
        "40",
    ]
    for stage in ("sft", "dpo", "grpo"):
        batch = ["--per_device_train_batch_size", "16"]
        more = ["--beta", "0.1"] if stage != "sft" else []
        more += ["--sft_weight", "0", "--precompute_ref_log_probs", "false"] if stage == "dpo" else []
        output = launch(stage, "--config", f"data/configs/{stage}.yaml", *few, *batch, *more, output=stage)
        assert (output / "adapter_model.safetensors").exists() and not (output / "model.safetensors").exists()
        if stage == "dpo":
            first = next(row for row in read_metrics(output) if "loss" in row)
            assert first["loss"] == pytest.approx(0.693147, abs=1e-5)


def test_a_merged_adapter_is_a_model_to_build_on_and_a_bare_one_is_merged_without_use_peft(launch, capsys):
    from transformers import AutoModelForCausalLM, GenerationConfig

    pytest.importorskip("peft")
    few = [
        "--config",
        "data/configs/sft.yaml",
        "--max_steps",
        "2",
        "--eval_steps",
        "0",
        "--use_peft",
        "--max_train_samples",
        "20",
    ]
    bare = launch("sft", *few, "--model_name_or_path", "data/base_model", output="bare")
    merged = launch("sft", *few, "--model_name_or_path", "data/base_model", "--merge_lora", output="merged")
    launch("sft", *few, "--model_name_or_path", merged, output="third")
    full = launch("sft", *few, "--use_peft", "false", "--model_name_or_path", bare, output="full")
    assert f"model: the adapter {bare}, merged into its base" in capsys.readouterr().out
    assert not (full / "adapter_model.safetensors").exists()
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (merged, full))
    assert all(not torch.equal(before[name], after[name]) for name in before)  # all of it is trained
    settings = {"generation_config": GenerationConfig.from_pretrained(bare)}
    one, other = AutoModelForCausalLM.from_pretrained(merged), AutoModelForCausalLM.from_pretrained(bare, **settings)
    assert one.generation_config.eos_token_id == other.generation_config.eos_token_id
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(one(ids).logits, other(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_new_dataset_takes_the_standard_settings_and_not_those_of_the_demo(capsys):
    from common.command_line import parse_args
    from train_sft import Args

    def parsed(*words):
        return parse_args(Args, demo("sft"), argv=list(words))

    assert parsed().learning_rate == 1e-3 and "embedded demo" in capsys.readouterr().err
    assert parsed("--dataset_name", "mine.jsonl").learning_rate == 2e-5
    assert parsed("--learning_rate", "5e-4").learning_rate == 5e-4
    args = parsed("--model_name_or_path", "mine")  # the rows of the demo, and not its settings
    assert args.learning_rate == 2e-5 and args.dataset_name == ["data/sft"]


@pytest.mark.parametrize(
    ("stage", "row"),
    [
        ("pretrain", {"text": "one two three four five six seven eight nine ten"}),
        ("sft", {"instruction": "What is 1+1?", "output": "Answer: 2"}),
        (
            "dpo",
            {"chosen": "\n\nHuman: What is 1+1?\n\nAssistant: 2", "rejected": "\n\nHuman: What is 1+1?\n\nAssistant: 3"},
        ),
    ],
)
def test_without_prompts_the_first_rows_are_completed_at_each_evaluation(stage, row, launch, tmp_path):
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    words = ["--model_name_or_path", "data/base_model", "--dataset_name", tmp_path / "rows.jsonl", "--max_steps", "2"]
    words += ["--max_length", "64"] if stage == "pretrain" else []
    output = launch(stage, *words, "--eval_steps", "2", "--num_samples", "2", "--eval_max_new_tokens", "4")
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [0, 0, 2, 2]
    prompt = samples[0]["prompt"]
    assert prompt == (
        "one two three four five six seven eight" if stage == "pretrain" else [{"role": "user", "content": "What is 1+1?"}]
    )


def test_an_architecture_that_cannot_be_packed_and_has_no_cache_trains_and_is_sampled_from(launch, tmp_path, capsys):
    from transformers import AutoTokenizer, RwkvConfig, RwkvForCausalLM

    torch.manual_seed(0)
    config = RwkvConfig(vocab_size=512, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, context_length=512)
    RwkvForCausalLM(config).save_pretrained(tmp_path / "rwkv")
    AutoTokenizer.from_pretrained("data/base_model").save_pretrained(tmp_path / "rwkv")
    words = [
        "--model_name_or_path",
        tmp_path / "rwkv",
        "--dataset_name",
        "data/sft",
        "--max_steps",
        "3",
        "--max_train_samples",
        "24",
    ]
    words += ["--eval_steps", "3", "--max_eval_samples", "2", "--eval_max_new_tokens", "4"]
    launch("sft", *words, "--learning_rate", "1e-2", "--logging_steps", "1")
    said = capsys.readouterr().out
    assert "padded batches instead" in said and "sampling is slow" in said and (tmp_path / "out" / "samples.jsonl").exists()
    losses = [row["loss"] for row in read_metrics(tmp_path / "out") if "loss" in row]
    assert losses[-1] < losses[0]


SHORT = [
    "--model_name_or_path",
    "data/base_model",
    "--max_steps",
    "4",
    "--logging_steps",
    "1",
    "--eval_steps",
    "0",
    "--eval_prompts",
    "",
]


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo", "robust", "apo_zero", "sppo_hard", "simpo", "orpo"])
def test_every_dpo_loss_type_lowers_its_loss(loss_type, launch):
    words = ["--config", "data/configs/dpo.yaml", *SHORT, "--max_train_samples", "8", "--per_device_train_batch_size", "8"]
    words += [
        "--loss_type",
        loss_type,
        "--learning_rate",
        "3e-5",
        "--warmup_steps",
        "0",
        "--sft_weight",
        "1" if loss_type == "orpo" else "0",
    ]
    rows = [row for row in read_metrics(launch("dpo", *words)) if "loss" in row]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["rewards/margins"] > rows[0]["rewards/margins"]


@pytest.mark.parametrize(
    "options",
    [
        ["--steps_per_generation", "2", "--num_iterations", "2", "--beta", "0.1"],
        ["--loss_type", "grpo", "--entropy_coef", "0.01", "--scale_rewards", "batch"],
        ["--loss_type", "dr_grpo", "--scale_rewards", "none", "--mask_truncated_completions"],
        [
            "--loss_type",
            "bnpo",
            "--importance_sampling_level",
            "sequence",
            "--num_iterations",
            "2",
            "--epsilon_high",
            "0.28",
        ],
        ["--top_p", "0.9", "--top_k", "20", "--temperature", "0.8", "--gradient_accumulation_steps", "2"],
    ],
    ids=lambda options: options[0] + " " + options[1],
)
def test_every_grpo_option_trains(options, launch):
    words = [
        "--config",
        "data/configs/grpo_zero.yaml",
        *SHORT,
        "--per_device_train_batch_size",
        "16",
        "--num_generations",
        "4",
    ]
    output = launch("grpo", *words, *options)
    rows = [row for row in read_metrics(output) if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and any(row["grad_norm"] > 0 for row in rows)
    rollouts = {json.loads(line)["step"] for line in (output / "completions.jsonl").read_text().splitlines()}
    served = {"--steps_per_generation": {1}, "--loss_type": {1, 3} if "--num_iterations" in options else {1, 2, 3, 4}}
    assert rollouts == served.get(options[0], {1, 2, 3, 4})
    if "--num_iterations" in options:  # the model has moved since it sampled: the ratio shows it
        assert rows[0]["clip_ratio/region_mean"] == 0
