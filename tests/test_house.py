"""The house: where things stand, that imports go one way, that no flag is dead, that the four scripts read the same."""

import ast
import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from common.args import CommonArgs
from tests.conftest import ROOT

import pytest
import yaml

# The longest that each script may be, in lines.
SCRIPTS = {"train_pretrain": 190, "train_sft": 140, "train_dpo": 190, "train_grpo": 360}
FOUR = list(SCRIPTS)
FROM_GRPO = ("train_distill", "train_ppo")
EXPERIMENTS = sorted(path.stem for path in (ROOT / "experiments").glob("train_*.py"))
SCRIPTS |= {f"experiments.{name}": 430 if name in FROM_GRPO else 220 for name in EXPERIMENTS}
SCRIPTS["experiments.train_tools"] = 530
COMMON = ROOT / "common"
MODULES = sorted(COMMON.rglob("*.py"))
LONGEST = 420  # lines of a module
# From the ground up: what stands on a floor imports what stands below it; within a wing its modules import each other.
FLOORS = [
    {"errors", "losses", "time_limit"},
    {"memory", "processes"},
    {"args"},
    {"flags"},
    {"command_line"},
    {"data"},
    {"collators"},
    {"model"},
    {"sampling"},
    {"evaluate"},
    {"run"},
    {"extras"},
]
SHARED = {field.name for field in dataclasses.fields(CommonArgs)}


def path_of(script: str) -> Path:
    return ROOT / f"{script.replace('.', '/')}.py"


def source_of(script: str) -> str:
    return path_of(script).read_text()


def fields_of(script: str) -> list[dataclasses.Field]:
    return list(dataclasses.fields(importlib.import_module(script).Args))


def name_of(path: Path) -> str:
    """common/data/load.py -> common.data.load, common/data/__init__.py -> common.data."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}


def imports_of(path: Path, types: bool = True) -> set[str]:
    """The modules that a file imports, at its top and inside of functions. types: those for type checkers only, too."""
    found, tree = set(), ast.parse(path.read_text())
    if not types:
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            for name in node.names:
                module = f"{node.module}.{name.name}"
                found.add(module if module in NAMES else node.module)
    return found


def is_ours(module: str) -> bool:
    return module.split(".")[0] in ("common", "experiments", *FOUR)


def floor_of(module: str) -> int:
    """Of a module of common, by its wing; -1 for the package itself, and for the table of extras, which import nothing."""
    place = [] if module == "common.extras" else module.split(".")[1:2]
    return next(i for i, floor in enumerate(FLOORS) if place[0] in floor) if place else -1


# --- what imports what ----------------------------------------------------------------------------------------------


def test_imports_go_from_a_later_wing_to_an_earlier_one():
    for path in MODULES:
        name = name_of(path)
        for module in filter(is_ours, imports_of(path)):
            assert module in NAMES, f"{name} imports {module}: a script, or nothing"
            same_wing = name.split(".")[:2] == module.split(".")[:2]
            assert floor_of(module) < floor_of(name) or same_wing, f"{name} imports {module}, which stands above it"


def test_what_a_reader_looks_for_first_stands_at_the_top():
    at_the_top = {path.stem for path in COMMON.glob("*.py")} - {"__init__"}
    assert at_the_top == {
        "args",
        "collators",
        "command_line",
        "errors",
        "evaluate",
        "flags",
        "losses",
        "memory",
        "processes",
        "time_limit",
    }
    wings = {path.parent.name for path in COMMON.glob("*/*.py")}
    assert wings == {"data", "model", "sampling", "run", "extras"} and at_the_top | wings == set().union(*FLOORS)


def test_the_maths_and_the_errors_stand_on_nothing_of_ours():
    assert imports_of(COMMON / "losses.py") <= {"math", "torch", "torch.nn.functional"}
    for name in ("errors", "__init__"):
        assert not any(map(is_ours, imports_of(COMMON / f"{name}.py")))


def test_there_is_no_circle_among_the_modules():
    graph = {name_of(path): {module for module in imports_of(path, types=False) if is_ours(module)} for path in MODULES}
    done: set[str] = set()
    while ready := {name for name, needs in graph.items() if name not in done and needs <= done}:
        done |= ready
    assert done == graph.keys(), f"a circle among {sorted(graph.keys() - done)}"


def test_every_name_that_a_file_imports_of_ours_is_there():
    """Of benchmarks, tools and tests, too, some of which start only where a server or a GPU is at hand."""
    folders = ("common", "experiments", "tools", "tests", "benchmarks")
    files = [*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    assert len(files) > 200
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and is_ours(node.module):
                module = importlib.import_module(node.module)
                for name in node.names:
                    is_package = hasattr(module, "__path__")
                    there = hasattr(module, name.name) or (
                        is_package and importlib.util.find_spec(f"{node.module}.{name.name}")
                    )
                    assert there, f"{path.relative_to(ROOT)} imports {name.name} from {node.module}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_loads_no_large_library_that_it_may_not_need(script):
    code = f"import {script}, sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert "torch" in loaded and not loaded & {"transformers", "datasets", "peft", "tokenizers", "matplotlib", "pandas"}


# --- flags ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_read_and_explained(script):
    own, common = source_of(script), "".join(path.read_text() for path in MODULES if path != COMMON / "command_line.py")
    at_start = (COMMON / "command_line.py").read_text()
    for field in fields_of(script):
        read = re.compile(rf"\b(args|self)\.{field.name}\b|\bargs\[\"{field.name}\"\]")
        where = own + common + at_start if field.name in SHARED else own
        assert read.search(where), f"{field.name} is never read"
        assert field.metadata.get("help"), f"{field.name} has no help text"


@pytest.mark.parametrize("script", SCRIPTS)
def test_common_reads_shared_arguments_only(script):
    """What a script alone knows it hands over: so it can be changed without a look into common."""
    own = {field.name for field in fields_of(script)} - SHARED
    assert own
    for path in MODULES:
        source = path.read_text()
        read = {name for name in own if re.search(rf"args(\.|\[\"|\.get\(\"|, \"){name}\b", source)}
        assert not read, f"{name_of(path)} reads {read} of {script}"


# --- the scripts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short_and_written_from_top_to_bottom(script):
    source = source_of(script)
    assert len(source.splitlines()) <= SCRIPTS[script]
    assert not re.search(r"\bgc\b|noqa: E402", source)
    docstring, *statements = ast.parse(source).body
    kinds = [isinstance(node, ast.Import | ast.ImportFrom) for node in statements]
    assert isinstance(docstring.value, ast.Constant) and kinds == sorted(kinds, reverse=True), (
        "an import below the first code"
    )
    below = [node for statement in statements[sum(kinds) :] for node in ast.walk(statement)]
    assert not any(isinstance(node, ast.Import | ast.ImportFrom) for node in below), "an import inside of a function"
    others = [name for name in imports_of(path_of(script)) if name.startswith(("train_", "experiments.train_"))]
    assert not others, "a script imports no other one"
    assert source.count("__main__") == 1
    assert ast.unparse(statements[-1]).startswith("if __name__ == '__main__':\n    launch(main, Args, demo=")


def test_the_sections_of_the_scripts_are_the_same_in_the_same_order():
    for script in SCRIPTS:
        banners = re.findall(r"^    # --- (.+?) -+$", source_of(script), re.M)
        assert [name.removesuffix(" and reference") for name in banners] == [
            "data",
            "model",
            "the gradient of a window",
            "loop",
        ]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_is_read_in_one_go(path):
    assert len(path.read_text().splitlines()) <= LONGEST


# --- what lies beside the code --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_its_configs(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes >= 1
    assert path.read_text().startswith("#"), "say in a comment what it is for"


@pytest.mark.parametrize("path", sorted((ROOT / "data" / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_demo_configs_name_flags_that_exist(path):
    stage = path.stem.split("_")[0]
    known = {field.name for field in fields_of(f"train_{stage}")}
    assert yaml.safe_load(path.read_text()).keys() <= known


def test_the_pages_speak_of_things_that_exist():
    readme = "\n".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    for script, flags in re.findall(r"(train_\w+)\.py((?: +[^\n`|]*)?)", readme):
        if script in FOUR:
            known = {field.name for field in fields_of(script)} | {"config", "help"}
            assert {flag for flag in re.findall(r"--(\w+)", flags)} <= known, (script, flags)
    for path in re.findall(r"`((?:common|data|tests|benchmarks|accelerate_configs)/[\w./]+)`", readme):
        assert (ROOT / path).exists(), path


def test_the_shipped_files_are_small():
    model = ROOT / "data" / "base_model" / "model.safetensors"
    assert model.stat().st_size < 4_000_000
    texts = [p for p in (ROOT / "data").rglob("*") if p.suffix in (".txt", ".jsonl")]
    assert sum(p.stat().st_size for p in texts) < 3_000_000
