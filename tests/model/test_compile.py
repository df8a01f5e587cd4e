"""--torch_compile: the blocks are compiled, once for all windows, and the numbers stay."""

import shutil

import pytest
import torch

from tests.conftest import assert_same, losses, run_script, torchrun
from tests.run.test_health import STAGES
from tests.scripts.test_equivalence import arguments


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that a run has compiled, which run as they are."""
    found, compile_module = [], torch.nn.Module.compile

    def keep(graph, inputs):
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **words: compile_module(self, backend=keep, **words))
    torch.compiler.reset()
    yield found
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_the_blocks_are_compiled_once_for_windows_of_all_shapes(stage, graphs, launch):
    """Windows differ in the number of their sequences, in their lengths and in what these share."""
    words = [*STAGES[stage], "--max_steps", "8", "--save_steps", "0"]
    plain = launch(stage, *words, output="plain")
    assert not graphs
    compiled = launch(stage, *words, "--torch_compile", output="compiled")
    assert 1 <= len(graphs) <= 6  # of a block: attention is called between them
    assert_same(losses(plain), losses(compiled), tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("stage", ["pretrain", "sft", "dpo", "grpo"])
def test_two_processes_with_compiled_blocks_are_one_without(stage, launch, tmp_path):
    """By the real compiler."""
    whole = losses(launch(stage, *arguments(stage, 8, 1)))
    command = torchrun()
    command += [f"train_{stage}.py", *arguments(stage, 2, 2), "--torch_compile", "--output_dir", str(tmp_path / "two")]
    run = run_script(command)
    assert run.returncode == 0, run.stderr[-6000:]
    assert_same(whole, losses(tmp_path / "two"), tolerance=1e-4)
