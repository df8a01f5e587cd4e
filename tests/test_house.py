"""The house: where things stand, that arrows run one way, that no flag is dead, that the four scripts read the same."""

import ast
import dataclasses
import importlib
import re
from pathlib import Path

from tests.conftest import ROOT

import pytest
import yaml

SCRIPTS = ["train_pretrain", "train_sft", "train_dpo", "train_grpo"]
ROOMS = sorted((ROOT / "common").glob("*.py"))


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_arrows_run_one_way():
    graph = {}
    for path in ROOMS:
        ours = {name.removeprefix("common.") for name in imports_of(path) if name.startswith("common.")}
        assert not any(name.startswith("train_") for name in imports_of(path)), f"{path.name} imports a script"
        graph[path.stem] = ours
    assert not graph["losses"] and imports_of(ROOT / "common" / "losses.py") <= {"torch", "torch.nn.functional"}
    done: set[str] = set()
    while ready := {room for room, needs in graph.items() if room not in done and needs <= done}:
        done |= ready
    assert done == graph.keys(), f"a circle among {graph.keys() - done}"
    for script in SCRIPTS:
        assert not any(name.startswith("train_") for name in imports_of(ROOT / f"{script}.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_read_and_explained(script):
    source = (ROOT / f"{script}.py").read_text() + "".join(path.read_text() for path in ROOMS if path.stem != "arguments")
    for field in dataclasses.fields(importlib.import_module(script).Args):
        assert re.search(rf"args\.{field.name}\b|\[\"{field.name}\"\]", source), f"{field.name} is never read"
        assert field.metadata.get("help"), f"{field.name} has no help text"


def test_the_sections_of_the_scripts_are_the_same_in_the_same_order():
    banners = [re.findall(r"^    # --- (.+?) -+$", (ROOT / f"{script}.py").read_text(), re.M) for script in SCRIPTS]
    assert all(found == banners[0] for found in banners) and len(banners[0]) == 6


def test_what_the_scripts_share_is_written_the_same():
    """Blocks that would give silently different runs if they drifted apart."""
    shared = [
        "    sources, eval_sources = find_sources(args, ",
        "    optimizer = adamw(model, args.learning_rate, args.weight_decay, betas, args.adam_epsilon)",
        "    model, optimizer = accelerator.prepare(model.train(), optimizer)",
        "    def gradients(step: int, window: Window) -> torch.Tensor:",
        "        seed_step(args.seed, step, accelerator.process_index)",
        "                accelerator.backward(loss * window.unmean)",
        "        set_lr(optimizer, lr_at(step))\n        loss = fit(gradients, step, window)\n        grad_norm = accelerator."
        "clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)\n        health.check(loss, grad_norm, step, ",
        "        optimizer.step()\n        optimizer.zero_grad()",
    ]
    for script in SCRIPTS:
        source = (ROOT / f"{script}.py").read_text()
        for line in shared:
            assert line in source, f"{script}.py lacks or changes: {line.strip()}"


@pytest.mark.parametrize("path", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_its_configs(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes >= 1
    assert path.read_text().startswith("#"), "say in a comment what it is for"


@pytest.mark.parametrize("path", sorted((ROOT / "data" / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_demo_configs_name_flags_that_exist(path):
    stage = path.stem.split("_")[0]
    known = {field.name for field in dataclasses.fields(importlib.import_module(f"train_{stage}").Args)}
    assert yaml.safe_load(path.read_text()).keys() <= known


def test_the_readme_speaks_of_things_that_exist():
    readme = (ROOT / "README.md").read_text()
    for script, flags in re.findall(r"(train_\w+)\.py((?: +[^\n`|]*)?)", readme):
        if script in SCRIPTS:
            known = {field.name for field in dataclasses.fields(importlib.import_module(script).Args)} | {"config", "help"}
            assert {flag for flag in re.findall(r"--(\w+)", flags)} <= known, (script, flags)
    for path in re.findall(r"`((?:common|data|tests|benchmarks|accelerate_configs)/[\w./]+)`", readme):
        assert (ROOT / path).exists(), path


def test_the_shipped_files_are_small():
    model = ROOT / "data" / "base_model" / "model.safetensors"
    assert model.stat().st_size < 4_000_000
    texts = [p for p in (ROOT / "data").rglob("*") if p.suffix in (".txt", ".jsonl")]
    assert sum(p.stat().st_size for p in texts) < 3_000_000
