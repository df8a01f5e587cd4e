"""Files as Windows writes them, and a device that has no float64, as those of Macs."""

import json
from pathlib import Path
import sys

import common.memory
from common.memory import finest_dtype
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import ROOT, demo, read_metrics


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_files_of_windows_are_read(ending, launch, tmp_path):
    """Byte order marks, carriage returns, letters beyond ASCII."""
    row = {"messages": [{"role": "user", "content": "Grüße"}, {"role": "assistant", "content": "你好"}]}
    text = ending.join([json.dumps(row, ensure_ascii=False)] * 12)
    (tmp_path / "daten ö.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    settings = [f"dataset_name: {tmp_path}/daten ö.jsonl", "max_steps: 1", "eval_steps: 0"]
    (tmp_path / "set.yaml").write_bytes(b"\xef\xbb\xbf" + ending.join(settings).encode())
    output = launch("sft", "--config", tmp_path / "set.yaml", "--model_name_or_path", "data/base_model")
    assert json.loads((output / "dataset.json").read_text(encoding="utf-8"))["sources"][0]["rows"] == 12


# --- MPS ------------------------------------------------------------------------------------------------------------


class NoFloat64(TorchDispatchMode):
    """A tensor of float64 is an error, as on MPS. The tables of a script, and what becomes of a Python
    float are on the CPU always."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if float64_in(out) and not float64_in((args, kwargs)):
            frame = sys._getframe(1)  # up to the first one that is ours
            while not frame.f_code.co_filename.startswith(str(ROOT)) or "site-packages" in frame.f_code.co_filename:
                frame = frame.f_back
            file, function = Path(frame.f_code.co_filename).name, frame.f_code.co_name
            on_host = file == "rollout.py" or file.startswith("train_") or function in ("reduce", "_plain")
            assert on_host, (func, file, function)
        return out


def float64_in(values) -> bool:
    leaves = torch.utils._pytree.tree_leaves(values)
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 for leaf in leaves)


@pytest.mark.parametrize("stage", [pytest.param("sft", marks=pytest.mark.slow), "grpo"])
def test_no_float64_reaches_a_device_that_has_none(stage, launch, monkeypatch):
    assert finest_dtype(torch.device("mps")) == torch.float32
    monkeypatch.setattr(common.memory, "WITHOUT_FLOAT64", ("cpu", "mps"))
    words = ["--config", ROOT / demo(stage), "--max_steps", "1", "--logging_steps", "1", "--eval_steps", "0"]
    with NoFloat64():
        output = launch(stage, *words, "--model_name_or_path", "data/base_model")
    assert len([row for row in read_metrics(output) if "grad_norm" in row]) == 1
