"""Runs whose completions come from a server (a fake one), beside runs that sample themselves."""

import os
import signal
import subprocess
import sys
import time

from common.errors import UserError
from common.run.folder import checkpoints
from common.sampling.vllm import request_seed
import pytest
from safetensors.torch import load_file
import torch

from tests.conftest import (
    ROOT,
    read_metrics,
    read_rows,
    run_script,
    teacher,
    torchrun,
    train_metrics,
    words_of,
)
from tests.run.fsdp import LAUNCHER
from tests.sampling.fake_vllm import FakeVLLM

KEYS = [(42, rollout, i) for rollout in range(8) for i in range(64)]
KEYS += [(42, rollout, i, turn) for rollout in range(8) for i in range(64) for turn in range(4)]
COMMON = "--model_name_or_path data/base_model --max_steps 4 --save_steps 2 --eval_steps 0 --logging_steps 1"
COMMON += " --max_train_samples 60 --max_completion_length 24 --per_device_train_batch_size 16 --learning_rate 1e-3 --warmup_steps 0 --seed 42"
STAGES = {
    "grpo": "--config data/configs/grpo.yaml --num_generations 4 --reward_funcs length:4 --reward_weights 1 --num_iterations 2"
    " --beta 0.02",
    "grpo_ahead": "--config data/configs/grpo.yaml --num_generations 4 --reward_funcs length:4 --reward_weights 1"
    " --rollout_ahead 1",
    "ppo": "--config experiments/configs/ppo.yaml --reward_funcs length:4 --reward_weights 1",
    "distill": f"--config experiments/configs/distill.yaml --teacher_model_name_or_path {teacher()}",
    "tools": "--config experiments/configs/tools.yaml --num_generations 4 --reward_funcs length:4 --reward_weights 1"
    " --max_completion_length 32",
}


def words(stage, *servers, more=""):
    return [
        *STAGES[stage].split(),
        *COMMON.split(),
        *more.split(),
        *(["--rollout_server"] if servers else []),
        *servers,
    ]


@pytest.fixture
def fake():
    """fake(**how): a server with other weights than the runs start from; it ends with the test."""
    started = []

    def start(model=None, **how):
        how = {"max_model_len": 1024, "keys": {request_seed(key): key for key in KEYS}} | how
        started.append(FakeVLLM(model or teacher(), **how))
        return started[-1]

    yield start
    for server in started:
        server.die()


def assert_same_model(one, other, exact=True):
    file = (
        "adapter_model.safetensors" if (one / "adapter_model.safetensors").exists() else "model.safetensors"
    )
    a, b = load_file(one / file), load_file(other / file)
    for name, weight in a.items():
        if exact:
            assert torch.equal(weight, b[name]), name
        else:
            # Adam turns the rounding of a gradient near 0 into a step of up to the learning rate.
            assert (weight - b[name]).abs().mean() < 2e-5 and (weight - b[name]).abs().max() < 5e-3, name


def texts(output):
    return [line["completion"] for line in read_rows(output / "completions.jsonl")]


SLOW = [pytest.param(stage, marks=pytest.mark.slow) for stage in ("ppo", "distill", "tools")]


@pytest.mark.parametrize("stage", ["grpo", *SLOW])
def test_a_run_with_a_server_samples_the_same(stage, launch, fake):
    small = "--max_steps 2 --save_steps 0 --per_device_train_batch_size 8 --max_completion_length 8 --num_iterations 1 --beta 0"
    small += " --entropy_coef 0.001"  # so that completions without advantage are run, too
    more = small if stage == "grpo" else ""  # that one is in the fast suite
    own = launch(stage, *words(stage, more=more), output="own")
    server = fake()
    theirs = launch(stage, *words(stage, server.url, more=more), output="theirs")
    assert texts(own) == texts(theirs) and server.served > 0
    for one, other in zip(train_metrics(own), train_metrics(theirs), strict=True):
        known = {name for name in one if name in other and not name.startswith("sampling/")}
        expected = {name: other[name] for name in known}
        assert {name: one[name] for name in known} == pytest.approx(expected, rel=1e-3, abs=1e-4)
        if stage != "distill":
            # no completion of a step has an advantage: none is run
            assert other.get("sampling/logp_difference_max", 0.0) < 1e-3
            assert stage != "grpo" or "sampling/logp_difference_max" in other
    assert_same_model(own, theirs, exact=False)
    assert not list((theirs / "rollout_weights").iterdir())


def test_held_out_episodes_are_played_with_the_weights_of_now(launch, fake, tmp_path):
    """Before the first step and after the last one, too, when no rollout follows."""
    prompts = (ROOT / "experiments/data/tools/validation.jsonl").read_text().splitlines()[:6]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    more = "--max_steps 1 --save_steps 0 --per_device_train_batch_size 4 --eval_steps 1 --learning_rate 1e-2"
    more += (
        f" --max_completion_length 12 --eval_temperatures 0.7 --eval_dataset_name {tmp_path}/prompts.jsonl"
    )
    own, theirs = (
        launch("tools", *words("tools", *urls, more=more), output=f"{len(urls)}")
        for urls in ([], [fake().url])
    )
    told = [
        [(row["step"], row["completion"]) for row in read_rows(folder / "samples.jsonl")]
        for folder in (own, theirs)
    ]
    assert told[0] == told[1] and len({*told[0]}) == 12


class Drifting(FakeVLLM):
    """A server that samples some completions of the second rollout, by their places in it, from other weights than
    its answer to the probe."""

    places = ()

    def _complete(self, body):
        status, answer = super()._complete(body)
        is_drifted = body["seed"] in [request_seed((42, 1, place)) for place in self.places]
        if self.counts(body) and self.reloads > 1 and is_drifted:
            scores = answer["choices"][0]["logprobs"]
            scores["token_logprobs"] = [logp - 1 for logp in scores["token_logprobs"]]
        return status, answer


@pytest.mark.parametrize(
    ("dtype", "places", "windows"),
    [("float32", range(8), 1), ("bfloat16", [3], 1), ("float32", range(8, 16), 2)],
)
def test_each_rollout_is_compared_with_the_model(dtype, places, windows, launch):
    with (
        Drifting(teacher(), max_model_len=1024, dtype=dtype) as server,
        pytest.raises(UserError, match=r"nats a token off the model; (0.01|0.5) is the most"),
    ):
        server.places = places
        small = (
            f"--max_steps 4 --save_steps 0 --per_device_train_batch_size 8 --steps_per_generation {windows}"
        )
        small += " --max_completion_length 8 --num_iterations 1"
        small += " --entropy_coef 0.001"  # so that completions without advantage are run, too
        launch("grpo", *words("grpo", server.url, more=small))
    assert server.reloads == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "more"), [("grpo", ""), ("grpo_ahead", "--learning_rate 1e-4"), ("grpo", "--use_peft")]
)
def test_a_killed_run_pushes_and_goes_on_bit_for_bit(stage, more, launch, fake, tmp_path):
    more += " --max_steps 20 --num_iterations 1"
    whole = launch(stage, *words(stage, fake().url, more=more), output="whole")
    server = fake()
    command = [sys.executable, *words_of(stage), *words(stage, server.url, more=more)]
    command += ["--output_dir", str(tmp_path / "killed")]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ
    )
    deadline = time.monotonic() + 400
    while (
        len(checkpoints(tmp_path / "killed")) < 2 and process.poll() is None and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    step = max(int(path.name.split("-")[1]) for path in checkpoints(tmp_path / "killed"))
    assert step < 20
    before = server.reloads
    resumed = launch(stage, *words(stage, server.url, more=more), output="killed")
    assert server.reloads == before + 20 - step
    assert read_metrics(resumed) == read_metrics(whole)
    assert_same_model(whole, resumed)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--use_peft"])
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_two_processes_are_as_one(how, more, launch, fake, tmp_path, token_cache):
    one = launch("grpo", *words("grpo", fake().url, more=more), output="one")
    servers = [fake().url, fake(play="500").url]
    both = [
        *words("grpo", *servers, more=f"{more} --per_device_train_batch_size 8"),
        "--output_dir",
        str(tmp_path / "two"),
    ]
    both += ["--dataset_cache_dir", str(token_cache)]
    command = torchrun()
    if how == "fsdp2":
        (tmp_path / "launcher.py").write_text(LAUNCHER)
        command += [str(tmp_path / "launcher.py"), "grpo", "no"]
    else:
        command += words_of("grpo")
    run = run_script([*command, *both], timeout=200, CONFIG="fsdp2")
    assert run.returncode == 0, run.stderr[-6000:]
    assert texts(one) == texts(tmp_path / "two")
    # said by the first process alone
    assert "has failed (HTTP 500" in run.stdout or "has failed" not in run.stdout
    assert_same_model(one, tmp_path / "two", exact=False)


def test_a_server_that_does_not_fit_ends_the_run(launch, fake):
    server = fake(max_model_len=40)
    with pytest.raises(UserError, match="--max-model-len 40"):
        launch("grpo", *words("grpo", server.url), output="refused")
    assert server.reloads == 0
    with pytest.raises(UserError, match="--rollout_server"):
        launch("grpo", *words("grpo", "here"), output="refused")
