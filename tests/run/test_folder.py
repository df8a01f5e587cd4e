"""Whose output folder it is: another run is refused, what may change is said, an unfinished run goes on."""

import dataclasses
import importlib
import json
import shutil

from common.args import may_change
from common.errors import UserError
from common.run.output_dir import checkpoints, claim_output_dir, delete_run, earlier_args, write_manifest
from tests.conftest import read_metrics

import pytest
import torch
import yaml

SFT = "--config data/configs/sft.yaml --model_name_or_path data/base_model --max_train_samples 20 --eval_steps 0".split()
SFT += "--per_device_train_batch_size 4 --logging_steps 1 --save_steps 3 --max_steps 8 --max_eval_samples 8".split()
SFT += "--eval_max_new_tokens 4".split()
GRPO = "--config data/configs/grpo.yaml --model_name_or_path data/base_model --max_train_samples 20 --eval_steps 0".split()
GRPO += "--per_device_train_batch_size 8 --num_generations 4 --max_completion_length 4 --save_steps 1".split()


FIXED = {
    "common": "model_name_or_path model_revision tokenizer_name chat_template dtype use_peft lora_r lora_alpha lora_dropout "
    "lora_target_modules use_dora use_rslora init_lora_weights load_in_4bit load_in_8bit dataset_name dataset_config dataset_train_split dataset_weights dataset_format columns eval_fraction "
    "max_train_samples dataset_streaming streaming_buffer_size curriculum_column curriculum_fraction seed optim",
    "pretrain": "dataset_text_field max_length max_tokens_per_batch packing_strategy vocab_size config_name hidden_size "
    "num_layers num_heads num_kv_heads intermediate_size initializer_range tie_word_embeddings "
    "num_experts num_experts_per_tok moe_intermediate_size",
    "sft": "max_length train_on turn_dropping packing max_tokens_per_batch loss_type",
    "dpo": "max_length max_tokens_per_batch packing beta loss_type loss_weights label_smoothing simpo_gamma sft_weight",
    "grpo": "reward_funcs reward_weights scale_rewards num_generations system_prompt max_prompt_length "
    "max_completion_length temperature top_p top_k mask_truncated_completions beta epsilon epsilon_high entropy_coef "
    "loss_type importance_sampling_level use_bias_correction_kl num_iterations steps_per_generation delta advantage_estimator "
    "importance_correction importance_cap top_entropy_quantile rollout_ahead",
}


MAY_CHANGE = {
    "course": "learning_rate lr_scheduler_type warmup_steps lr_decay_fraction min_lr_ratio weight_decay adam_beta1 adam_beta2 "
    "adam_epsilon max_grad_norm save_best early_stopping_delta per_device_train_batch_size gradient_accumulation_steps "
    "router_aux_loss_coef",
    "length": "max_steps num_train_epochs early_stopping_patience",
    "evaluation": "dataset_eval_split eval_dataset_name max_eval_samples eval_prompts eval_reward_funcs eval_temperatures "
    "eval_max_new_tokens regression_suite regression_samples regression_pass_at regression_temperature",
}
EXECUTION = (  # and precompute_ref_log_probs of DPO, generation_batch_size, rollout_server of GRPO
    "eval_steps per_device_eval_batch_size num_samples logging_steps save_steps save_total_limit report_to run_name output_dir "
    "sharded_checkpoints overwrite_output_dir dry_run resume_from_checkpoint dataset_cache_dir dataset_num_proc strict_data trust_remote_code "
    "auto_micro_batch max_bad_steps max_hours save_minutes reward_timeout merge_lora gradient_checkpointing "
    "activation_offloading torch_compile accept_changes export_dtype regression_steps empty_cache_above "
    "alert_webhook alert_memory_above alert_stall_minutes push_to_hub hub_model_id hub_private_repo hub_strategy"
)


def args_of(stage):
    return importlib.import_module(f"train_{stage}").Args


@pytest.mark.parametrize("stage", ["pretrain", "sft", "dpo", "grpo"])
def test_for_each_flag_it_is_decided_whether_it_may_change(stage):
    """A new flag says it where it is defined (`may_change`), or is listed here."""
    flags = {field.name for field in dataclasses.fields(args_of(stage))}
    allowed = may_change(args_of(stage))
    assert allowed.keys() == flags
    assert {name for name in flags if allowed[name] is None} == set(f"{FIXED['common']} {FIXED[stage]}".split())
    for kind, names in MAY_CHANGE.items():
        assert {name for name in flags if allowed[name] == kind} == set(names.split()), kind
    execution = {name for name in flags if allowed[name] == "execution"}
    assert set(EXECUTION.split()) <= execution and len(execution) == len(EXECUTION.split()) + {"dpo": 1, "grpo": 2}.get(
        stage, 0
    )


def test_a_value_where_several_may_stand_now_is_the_list_of_it(tmp_path, capsys):
    """A run that was begun when a flag took one value, which takes several now, goes on."""
    args = folder_of_a_run(tmp_path, dataset_name="data/sft", eval_temperatures=0.0)
    now = args | {"dataset_name": ["data/sft"], "eval_temperatures": [0.0]}
    assert claim(now).name == "checkpoint-6" and "->" not in capsys.readouterr().out
    with pytest.raises(UserError, match="is of another run"):
        claim(now | {"dataset_name": ["data/sft", "data/dpo"]})


def test_a_complete_run_that_was_to_be_sent_says_what_sends_it(tmp_path, capsys):
    args = folder_of_a_run(tmp_path, complete=True)
    with pytest.raises(SystemExit):
        claim(args | {"push_to_hub": True, "hub_model_id": "a/b", "hub_private_repo": True})
    assert f"python -m tools.push {tmp_path / 'out'} --hub_model_id a/b --hub_private_repo" in capsys.readouterr().out


def folder_of_a_run(tmp_path, *, steps=(3, 6), complete=False, processes=1, **changed):
    """An output folder as a run leaves it, with checkpoints of one small file; returns its arguments."""
    args = dataclasses.asdict(args_of("sft")()) | {
        "output_dir": str(tmp_path / "out"),
        "model_name_or_path": "data/base_model",
        "dataset_name": ["data/sft"],
        "max_steps": 8,
        **changed,
    }
    output = tmp_path / "out"
    output.mkdir()
    (output / "args.yaml").write_text(yaml.safe_dump(args))
    (output / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    for step in steps:
        folder = output / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"step": step, "processes": processes}))
        (folder / "args.yaml").write_text(yaml.safe_dump(args))
        write_manifest(folder)
    if complete:
        (output / "summary.json").write_text(json.dumps({"final": {"step": 8}}))
    return args


def claim(args, processes=1):
    return claim_output_dir(args_of("sft")(**args), earlier_args(args["output_dir"]), processes)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"seed": 1}, "seed 0 -> 1"),
        ({"dataset_name": ["data/dpo"]}, r"dataset_name \['data/sft'\] -> \['data/dpo'\]"),
        ({"model_name_or_path": "gpt2", "dtype": "bfloat16"}, "data/base_model -> gpt2, dtype float32 -> bfloat16"),
        ({"lora_r": 8, "learning_rate": 1.0}, "lora_r 16 -> 8"),
    ],
)
def test_arguments_that_make_another_run_are_refused_with_the_difference(change, shown, tmp_path):
    args = folder_of_a_run(tmp_path)
    with pytest.raises(UserError, match=shown) as refused:
        claim(args | change)
    assert "learning_rate" not in str(refused.value) and "--overwrite_output_dir" in str(refused.value)
    with pytest.raises(UserError, match=shown):
        claim(args | change | {"resume_from_checkpoint": str(tmp_path / "out" / "checkpoint-3")})


def test_other_changed_arguments_are_said(tmp_path, capsys):
    args = folder_of_a_run(tmp_path)
    changed = {"learning_rate": 0.5, "max_steps": 20, "eval_steps": 7, "gradient_checkpointing": True, "report_to": "wandb"}
    assert claim(args | changed) == tmp_path / "out" / "checkpoint-6"
    assert capsys.readouterr().out.splitlines() == [
        "gradient_checkpointing: False -> True",
        "max_steps: 8 -> 20",
        "learning_rate: 2e-05 -> 0.5",
        "eval_steps: 100 -> 7",
        "report_to: None -> wandb",
    ]
    # args.yaml has the new values as soon as the run starts; the checkpoint is still that of the old ones
    (tmp_path / "out" / "args.yaml").write_text(yaml.safe_dump(args | changed))
    claim(args | changed)
    assert "learning_rate: 2e-05 -> 0.5" in capsys.readouterr().out
    claim(args)
    assert capsys.readouterr().out == ""


def test_batch_size_accumulation_and_processes_may_change(tmp_path, capsys):
    args = folder_of_a_run(tmp_path, per_device_train_batch_size=8, processes=2)
    change = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    assert claim(args | change, processes=1)
    assert capsys.readouterr().out.splitlines() == [
        "per_device_train_batch_size: 8 -> 4",
        "gradient_accumulation_steps: 1 -> 4",
        "processes: 2 -> 1",
    ]


def test_what_is_compared_by_save_best_stays(tmp_path):
    args = folder_of_a_run(tmp_path, save_best="eval_loss")
    for name in MAY_CHANGE["evaluation"].split():
        with pytest.raises(UserError, match=name):
            claim(args | {name: "another"})
        assert claim(args | {name: "another", "save_best": "eval_perplexity"})
    (tmp_path / "plain").mkdir()
    args = folder_of_a_run(tmp_path / "plain")
    assert claim(args | {"max_eval_samples": 3})


def test_a_complete_run_is_left_alone_or_made_longer(tmp_path, capsys):
    args = folder_of_a_run(tmp_path, complete=True)
    for same in ({}, {"num_samples": 9, "eval_steps": 5, "dataset_num_proc": 1}):
        with pytest.raises(SystemExit) as done:
            claim(args | same)
        assert done.value.code == 0 and "complete" in capsys.readouterr().out
    for other in ({"learning_rate": 0.5}, {"max_steps": 7}, {"max_steps": 8, "num_train_epochs": 2.0}):
        with pytest.raises(UserError, match="holds a complete run"):
            claim(args | other)
    with pytest.raises(UserError, match="seed 0 -> 1"):
        claim(args | {"seed": 1, "max_steps": 20})
    assert claim(args | {"max_steps": 20, "learning_rate": 0.5}) == tmp_path / "out" / "checkpoint-6"
    assert "max_steps: 8 -> 20" in capsys.readouterr().out
    assert claim(args | {"max_steps": -1, "num_train_epochs": 3.0})
    for folder in checkpoints(args["output_dir"]):
        shutil.rmtree(folder)
    with pytest.raises(UserError, match="no checkpoint to go on from"):
        claim(args | {"max_steps": 20})


def test_a_named_checkpoint(tmp_path):
    args = folder_of_a_run(tmp_path)
    named = tmp_path / "out" / "checkpoint-3"
    assert claim(args | {"resume_from_checkpoint": str(named)}) == named
    with pytest.raises(UserError, match="overwrite_output_dir empties"):
        claim(args | {"resume_from_checkpoint": str(named), "overwrite_output_dir": True})
    elsewhere = {"output_dir": str(tmp_path / "new"), "resume_from_checkpoint": str(named)}
    assert claim(args | elsewhere) == named
    with pytest.raises(UserError, match="seed 0 -> 1.*--model_name_or_path"):
        claim(args | elsewhere | {"seed": 1})
    (tmp_path / "b").mkdir()
    other = folder_of_a_run(tmp_path / "b", steps=(4,))
    with pytest.raises(UserError, match="holds another run than that of"):
        claim(other | {"resume_from_checkpoint": str(named)})
    begun = other | {"resume_from_checkpoint": str(named)}  # the same command once more: where it was, not where it began
    (tmp_path / "b" / "out" / "args.yaml").write_text(yaml.safe_dump(begun))
    assert claim(begun) == tmp_path / "b" / "out" / "checkpoint-4"


def test_checkpoints_without_metrics_are_a_run_and_an_unreadable_one_is_not_overwritten(tmp_path):
    args = folder_of_a_run(tmp_path)
    (tmp_path / "out" / "metrics.jsonl").unlink()
    assert claim(args) == tmp_path / "out" / "checkpoint-6"
    (tmp_path / "out" / "args.yaml").write_text("seed: [")
    assert claim(args) == tmp_path / "out" / "checkpoint-6"  # which has the arguments, too
    for folder in checkpoints(args["output_dir"]):
        (folder / "args.yaml").unlink()
        write_manifest(folder)
    with pytest.raises(UserError, match="args.yaml cannot be read"):
        claim(args)
    assert claim(args | {"overwrite_output_dir": True}) is None
    (tmp_path / "out" / ".mine.tmp").mkdir()
    delete_run(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".mine.tmp"]


def test_a_resumed_run_takes_its_optimizer_settings_from_the_arguments(launch, monkeypatch, capsys):
    launch("sft", *SFT, "--max_steps", "3", "--weight_decay", "0.1", output="out")
    output = launch("sft", *SFT, "--max_steps", "4", "--weight_decay", "0.3", "--adam_beta2", "0.9", "--save_steps", "1")
    assert "weight_decay: 0.1 -> 0.3" in capsys.readouterr().out
    saved = torch.load(output / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert [group["weight_decay"] for group in saved["param_groups"]] == [0.3, 0.0]
    assert [group["betas"][1] for group in saved["param_groups"]] == [0.9, 0.9]
    assert saved["state"][0]["step"] == 4


@pytest.mark.parametrize(
    "stage, change, said",
    [
        (
            "sft",
            ["--per_device_train_batch_size", "2"],
            "a step has 2 samples, and had 4 samples: the order of the samples is",
        ),
        (
            "sft --max_tokens_per_batch 300",
            ["--gradient_accumulation_steps", "2"],
            "a step has 2 micro-batches, and had 1 micro-batches",
        ),
        ("sft --max_tokens_per_batch 300", ["--per_device_train_batch_size", "2"], None),
        ("grpo", ["--gradient_accumulation_steps", "2"], "a step has 16 completions, and had 8 completions"),
    ],
)
def test_a_run_that_goes_on_with_other_steps_says_so(stage, change, said, launch, capsys):
    stage, *words = stage.split()
    words = [*(SFT if stage == "sft" else GRPO), *words, "--save_steps", "1", "--max_steps"]
    launch(stage, *words, "2")
    launch(stage, *words, "4", *change)
    out = capsys.readouterr().out
    assert (said in out) if said else "a step has" not in out


def test_with_smaller_micro_batches_a_run_goes_on_as_before(launch, capsys):
    whole = launch("sft", *SFT, output="whole")
    launch("sft", *SFT, "--max_steps", "3", "--lr_scheduler_type", "constant", "--warmup_steps", "0", output="split")
    few = ["--lr_scheduler_type", "constant", "--warmup_steps", "0"]
    whole = launch("sft", *SFT, *few, output="constant")
    elastic = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
    resumed = launch("sft", *SFT, *few, *elastic, output="split")
    said = capsys.readouterr().out
    assert "per_device_train_batch_size: 4 -> 2" in said and "order of the samples" not in said
    for one, other in zip(read_metrics(whole), read_metrics(resumed), strict=True):
        assert one["num_tokens"] == other["num_tokens"] and one["loss"] == pytest.approx(other["loss"], rel=1e-4)
