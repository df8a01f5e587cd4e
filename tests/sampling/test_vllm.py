"""GRPO with rollouts from the real vLLM: opt in, because the engine needs an environment of its own (its pins
clash with ours).

CONTRIBUTING.md has the commands. VLLM_PYTHON names the Python of that environment, in which a server is
started (a minute or two), in float32 on a CPU, with a tiny Llama whose weights are not tied: vLLM's CPU
backend keeps a copy of a tied head, which no push reaches.
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.request

import common  # noqa: F401  before torch, as in the scripts
import pytest
import torch
import transformers

from tests.conftest import ROOT, free_port, read_metrics, run_script
from tests.tiny import SIZE

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not PYTHON,
        reason="needs VLLM_PYTHON=/path/to/python of an environment with vllm: see CONTRIBUTING.md",
    ),
]

STEPS = 20
START = 600  # seconds that the server may take
REWARD = '''
def even(completion_ids, **columns):
    """The share of tokens with an even number: half of them for a random model, and learned in a dozen steps."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
'''
OPTIONS = "--enforce-eager --dtype float32 --no-enable-chunked-prefill --kv-cache-memory-bytes 268435456 --max-model-len 256"
OPTIONS += " --generation-config vllm --logprobs-mode processed_logprobs"


@pytest.fixture
def files(tmp_path):
    """A model of random weights, heads of 32 as vLLM's CPU attention wants them; prompts; a reward."""
    torch.manual_seed(0)
    sizes = SIZE | {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
    }
    sizes |= {
        "bos_token_id": None,
        "eos_token_id": 0,
        "initializer_range": 0.08,
        "tie_word_embeddings": False,
    }
    config = transformers.LlamaConfig(**sizes)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [0, 2]
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "data" / "base_model" / name, tmp_path / "model" / name)
    words = (
        "the dog has four legs and a cat eats nuts in the pond while Tom finds five birds on a bus".split()
    )
    prompts = [
        " ".join(words[(i * 7 + j * (i % 3 + 1)) % len(words)] for j in range(4 + i % 9)) for i in range(32)
    ]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    )
    (tmp_path / "rewards.py").write_text(REWARD)
    return tmp_path


@pytest.fixture
def server(files):
    """The address of a running vLLM with the model."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        PYTHON,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(files / "model"),
        *OPTIONS.split(),
    ]
    command += [*"--served-model-name policy --host 127.0.0.1 --port".split(), str(port)]
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    del environ["VLLM_PYTHON"]  # vLLM warns of variables of its own that it does not know
    environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with (files / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=files, env=environ, stdout=log, stderr=log, start_new_session=True
        )
    try:
        until = time.monotonic() + START
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"vLLM did not start: {(files / 'server.log').read_text()[-3000:]}")
            time.sleep(1)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # a session of its own
        process.wait()


def healthy(url):
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return answer.status == 200
    return False


def test_the_engine_agrees_with_the_trainer(files, server):
    """20 steps with rollouts from the server, in a process of its own, as a user has it."""
    words = f"--model_name_or_path {files}/model --dataset_name {files}/prompts.jsonl --reward_funcs {files}/rewards.py:even"
    words += " --num_generations 8 --per_device_train_batch_size 64 --max_completion_length 24 --learning_rate 6e-3"
    words += f" --max_steps {STEPS} --logging_steps 1 --save_steps 0 --eval_steps 0 --rollout_server {server}"
    command = [sys.executable, "train_grpo.py", *words.split(), "--output_dir", str(files / "out")]
    done = run_script(command, timeout=600, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row for row in read_metrics(files / "out") if "reward" in row]
    assert len(rows) == STEPS  # one of each rollout, of which each is sampled after a push
    assert max(row["sampling/logp_difference_max"] for row in rows) < 1e-3  # seen: 2e-6
    assert max(row["sampling/importance_clipped"] for row in rows) == 0
    reward = [row["reward"] for row in rows]
    assert statistics.mean(reward[:2]) < 0.6 and statistics.mean(reward[-5:]) > 0.85  # it learns
