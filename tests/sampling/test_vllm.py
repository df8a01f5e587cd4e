"""GRPO with rollouts from the real vLLM: opt in, because the engine needs an environment of its own (its pins clash with ours).

CONTRIBUTING.md has the commands. VLLM_PYTHON names the Python of that environment; there the server is started once for all the
tests (a minute or two), in float32 on a CPU, with a tiny Llama whose weights are not tied: vLLM's CPU backend keeps a copy of a
tied head, which no push reaches. The last test kills it.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace
import urllib.request

import common  # noqa: F401  before torch, as in the scripts
import psutil
import pytest
import torch
import transformers

from tests.conftest import ROOT, free_port, read_metrics, run_script

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not PYTHON, reason="needs VLLM_PYTHON=/path/to/python of an environment with vllm: see CONTRIBUTING.md"
    ),
]

LONGEST = 24  # tokens of a completion
STEPS = 20
START = 600  # seconds that the server may take
REWARD = '''
def even(completion_ids, **columns):
    """The share of tokens with an even number: half of them for a random model, and learned in a dozen steps."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
'''
OPTIONS = "--enforce-eager --dtype float32 --no-enable-chunked-prefill --kv-cache-memory-bytes 268435456 --max-model-len 256"
OPTIONS += " --generation-config vllm --logprobs-mode processed_logprobs"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model of random weights, heads of 32 as vLLM's CPU attention wants them; prompts; a reward."""
    folder = tmp_path_factory.mktemp("vllm")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [0, 2]
    model.save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "data" / "base_model" / name, folder / "model" / name)
    words = "the dog has four legs and a cat eats nuts in the pond while Tom finds five birds on a bus".split()
    prompts = [" ".join(words[(i * 7 + j * (i % 3 + 1)) % len(words)] for j in range(4 + i % 9)) for i in range(32)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (folder / "rewards.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def server(files):
    """A running vLLM with the model. .url; .family(): its processes."""
    port = free_port()
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(files / "model"), *OPTIONS.split()]
    command += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    del environ["VLLM_PYTHON"]  # vLLM warns of variables of its own that it does not know
    environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with (files / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=files, env=environ, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    own = psutil.Process(process.pid)
    try:
        until = time.monotonic() + START
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"vLLM did not start: {(files / 'server.log').read_text()[-3000:]}")
            time.sleep(1)
        yield SimpleNamespace(url=url, family=lambda: [own, *own.children(recursive=True)])
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for member in reversed([own, *own.children(recursive=True)]):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        process.wait()


def healthy(url):
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return answer.status == 200
    return False


def arguments(files, steps, *more):
    words = f"--model_name_or_path {files}/model --dataset_name {files}/prompts.jsonl --reward_funcs {files}/rewards.py:even"
    words += f" --num_generations 8 --per_device_train_batch_size 64 --max_completion_length {LONGEST} --learning_rate 6e-3"
    words += f" --max_steps {steps} --logging_steps 1 --save_steps 0 --eval_steps 0"
    return [*words.split(), *map(str, more)]


def column(output, name):
    return [row[name] for row in read_metrics(output) if name in row]


# --- a run ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_run(files, server, tmp_path_factory):
    """20 steps with rollouts from the server, in a process of its own, as a user has it."""
    return script_run(files, STEPS, tmp_path_factory.mktemp("run") / "out", "--rollout_server", server.url)


def script_run(files, steps, output, *more):
    command = [sys.executable, "train_grpo.py", *arguments(files, steps, "--output_dir", output, *more)]
    done = run_script(command, timeout=600, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    return output


def test_the_engine_agrees_with_the_trainer(one_run):
    differences = column(one_run, "sampling/logp_difference")
    assert len(differences) == STEPS  # one of each rollout, of which each is sampled after a push
    assert max(differences) < 1e-3 and max(column(one_run, "sampling/logp_difference_max")) < 1e-3  # seen: 3e-7 and 2e-6
    assert max(column(one_run, "sampling/importance_clipped")) == 0
    reward = column(one_run, "reward")
    assert statistics.mean(reward[:2]) < 0.6 and statistics.mean(reward[-5:]) > 0.85  # it learns


# --- the last test: it kills the server -----------------------------------------------------------------------------------


def test_a_killed_engine_ends_the_run_in_one_line(files, server, tmp_path):
    """In its fifth step or so. The own sampler takes over from the checkpoint."""
    output = tmp_path / "killed"
    command = [
        sys.executable,
        "train_grpo.py",
        *arguments(files, STEPS, "--output_dir", output, "--rollout_server", server.url),
    ]
    command[command.index("--save_steps") + 1] = "2"
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(command, cwd=ROOT, stdout=err, stderr=err, env=os.environ | {"OMP_NUM_THREADS": "1"})
    metrics, until = output / "metrics.jsonl", time.monotonic() + 240
    while process.poll() is None and time.monotonic() < until:
        if metrics.exists() and metrics.read_text().count('"reward"') >= 5:
            break
        time.sleep(0.02)
    for member in reversed(server.family()):
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGKILL)
    code = process.wait(240)
    text = (tmp_path / "err").read_text()
    assert code != 0 and "Traceback" not in text, text[-3000:]
    assert re.search(rf"{re.escape(server.url)}", text.strip().splitlines()[-1]), text[-3000:]
    assert list(output.glob("checkpoint-*"))
    script_run(files, STEPS, output, "--save_steps", 2)
    assert column(output, "reward")[-1] > 0.85
