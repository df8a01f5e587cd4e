"""The oldest versions that the README names (requirements-oldest.txt), without `datasets`, in an environment
of their own.

    OLDEST_PYTHON=folder/bin/python pytest -m slow tests/test_oldest.py     # one that is there already

Making it takes minutes and 5 GB: PyTorch comes with CUDA from PyPI.
"""

import os
from pathlib import Path
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow
REQUIREMENTS = ROOT / "requirements-oldest.txt"
NO_INDEX = "No matching distribution|Could not find a version|Connection|Temporary failure in name resolution|Max retries"
CORE = """
tests/data/test_tokens.py tests/data/test_formats.py tests/test_losses.py tests/test_collators.py
tests/model/test_attention.py tests/model/test_lm_head.py tests/model/test_lora.py tests/model/test_optimizer.py tests/model/test_experts.py
tests/sampling/test_generate.py tests/run/test_checkpoint.py tests/run/test_configs.py
""".split()
STAGES = ("pretrain", "sft", "dpo", "grpo")


@pytest.fixture(scope="module")
def oldest(tmp_path_factory):
    """The interpreter of that environment."""
    if os.environ.get("OLDEST_PYTHON"):
        yield os.environ["OLDEST_PYTHON"]
        return
    folder = tmp_path_factory.mktemp("oldest")
    if (free := shutil.disk_usage(folder).free / 2**30) < 12:
        pytest.skip(f"{free:.0f} GiB of disk are free, an environment with PyTorch from PyPI needs 12")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    command = [python, *"-m pip install --quiet --no-cache-dir --no-compile -r".split(), str(REQUIREMENTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    if done.returncode and re.search(NO_INDEX, done.stderr):
        pytest.skip(f"pip finds no index with these versions: {done.stderr.strip().splitlines()[-1][:200]}")
    assert done.returncode == 0, done.stderr[-3000:]
    yield python
    shutil.rmtree(folder, ignore_errors=True)


def in_it(python, *words, timeout=1500):
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, *map(str, words)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("stage", STAGES)
def test_the_oldest_versions_train(stage, oldest, tmp_path):
    words = "--max_steps 2 --max_train_samples 256 --max_eval_samples 4 --eval_max_new_tokens 4 --logging_steps 1 --save_steps 1"
    model = [] if stage == "pretrain" else ["--model_name_or_path", "data/base_model"]
    config = ["--config", f"data/configs/{stage}.yaml"]
    out = in_it(
        oldest, f"train_{stage}.py", *config, *model, *words.split(), "--output_dir", tmp_path / "out"
    )
    assert (tmp_path / "out" / "summary.json").exists() and "saved in" in out


def test_the_oldest_versions_pass_the_core_of_the_suite(oldest):
    files = [path for path in CORE if Path(ROOT, path).exists()]
    assert files == CORE
    out = in_it(oldest, "-m", "pytest", "-p", "no:cacheprovider", *files)
    assert re.search(r"\d{3,} passed", out) and " failed" not in out
