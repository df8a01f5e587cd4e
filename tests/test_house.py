"""The house stays light: what imports what, how long things are, that every flag is read, that scripts read
the same."""

import ast
import dataclasses
import functools
import importlib
import io
from pathlib import Path
import re
import tokenize

from common.args import CommonArgs
from common.extras import EXTRAS
import pytest

from tests.conftest import EXPERIMENTS, ROOT

FOUR = ["train_pretrain", "train_sft", "train_dpo", "train_grpo"]
SCRIPTS = [*FOUR, *(f"experiments.train_{name}" for name in EXPERIMENTS)]
COMMON = ROOT / "common"
MODULES = sorted(COMMON.rglob("*.py"))
CORE = [path for path in MODULES if path.parent.name != "extras"]
SHARED = {field.name for field in dataclasses.fields(CommonArgs)}
# From the ground up: a module imports what stands below it, and modules of its own wing. `extras` may import
# all.
FLOORS = [
    {"errors", "losses", "extras"},  # of extras only the table, whose modules are loaded by name
    {"files", "memory", "processes"},
    {"args"},
    {"command_line"},
    {"data"},
    {"collators"},
    {"model"},
    {"sampling"},
    {"evaluate"},
    {"run"},
]
# Code lines: without comments, docstrings and blank lines.
LONGEST = 320  # of a module
LIGHT = {"common without extras": (6_000, 48), "common": (8_759, 77), "tests": (14_000, 118)}
SCRIPT_LINES = {
    "train_grpo": 240,
    "experiments.train_grpo_ahead": 300,
    "experiments.train_dynamic_sampling": 260,
    "experiments.train_online_dpo": 270,
    "experiments.train_tools": 420,
    "experiments.train_ppo": 300,
    "experiments.train_distill": 300,
    "experiments.train_self_distill": 300,
}


def path_of(script: str) -> Path:
    return ROOT / f"{script.replace('.', '/')}.py"


def fields_of(script: str) -> list[dataclasses.Field]:
    return list(dataclasses.fields(importlib.import_module(script).Args))


def name_of(path: Path) -> str:
    """common/data/load.py -> common.data.load, common/data/__init__.py -> common.data."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path) for path in MODULES}


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports, at its top and inside of functions; not those for type checkers
    only."""
    tree, found = ast.parse(path.read_text()), set()
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules = {f"{node.module}.{name.name}" for name in node.names}
            found |= {module if module in NAMES else node.module for module in modules}
    return found


def is_ours(module: str) -> bool:
    return module.split(".")[0] in ("common", "experiments", *FOUR)


def floor_of(module: str) -> int:
    """Of a module of common, by its wing; -1 for the package itself, which imports nothing."""
    wing = module.split(".")[1:2]
    return next(i for i, floor in enumerate(FLOORS) if wing[0] in floor) if wing else -1


@functools.cache
def code_lines(path: Path) -> int:
    """Lines without comments, docstrings and blank lines."""
    text, lines = path.read_text(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


# --- what imports what --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_imports_go_down(path):
    name = name_of(path)
    for module in filter(is_ours, imports_of(path)):
        assert module in NAMES, f"{name} imports {module}: a script, or nothing"
        assert not module.startswith("common.extras."), (
            f"{name} imports {module}: extra(...) loads it, in a function"
        )
        same_wing = name.split(".")[:2] == module.split(".")[:2]
        assert floor_of(module) < floor_of(name) or same_wing, (
            f"{name} imports {module}, which stands above it"
        )


def test_no_circle_and_nothing_below_the_ground():
    graph = {name_of(path): {module for module in imports_of(path) if is_ours(module)} for path in MODULES}
    done: set[str] = set()
    while ready := {name for name, needs in graph.items() if name not in done and needs <= done}:
        done |= ready
    assert done == graph.keys(), f"a circle among {sorted(graph.keys() - done)}"
    assert imports_of(COMMON / "losses.py") <= {"math", "torch", "torch.nn.functional"}
    assert not any(map(is_ours, imports_of(COMMON / "errors.py") | imports_of(COMMON / "__init__.py")))


def test_the_table_of_extras_is_complete():
    there = {path.stem for path in (COMMON / "extras").glob("[!_]*.py")}
    assert there == EXTRAS.keys()
    code = "".join(
        path.read_text() for path in [*MODULES, *map(path_of, SCRIPTS), *(ROOT / "tools").glob("*.py")]
    )
    for name, asked_by in EXTRAS.items():
        assert f'extra("{name}")' in code or f"common.extras.{name}" in code, f"{name}: nothing loads it"
        assert set(re.findall(r"--(\w+)", asked_by)) <= {
            f.name for script in FOUR for f in fields_of(script)
        }, asked_by


def test_every_imported_name_of_ours_exists():
    """Of benchmarks, tools and tests, too, some of which start only where a server or a GPU is at hand."""
    folders = ("common", "experiments", "tools", "tests", "benchmarks")
    for path in [*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and is_ours(node.module):
                module = importlib.import_module(node.module)
                for name in node.names:
                    there = (
                        name.name == "*"
                        or hasattr(module, name.name)
                        or f"{node.module}.{name.name}" in NAMES
                    )
                    assert there, f"{path.relative_to(ROOT)} imports {name.name} from {node.module}"


# --- how long things are ------------------------------------------------------------------------------------


def test_the_house_is_light():
    parts = {
        "common without extras": CORE,
        "common": MODULES,
        "tests": sorted((ROOT / "tests").rglob("*.py")),
    }
    for part, (lines, files) in LIGHT.items():
        found = sum(map(code_lines, parts[part]))
        assert found <= lines and len(parts[part]) <= files, (
            f"{part}: {found} lines in {len(parts[part])} files"
        )
    for path in MODULES:
        assert code_lines(path) <= LONGEST, path
    for script in SCRIPTS:
        assert code_lines(path_of(script)) <= SCRIPT_LINES.get(script, 160), script


# --- flags --------------------------------------------------------------------------------------------------


READ = re.compile(r'\bargs(?:\.|\["|\.get\("|, ")(\w+)|\bself\.(?!args\b)(\w+)|\bvalues\["(\w+)"\]')


def reads_of(path: Path) -> set[str]:
    """The arguments that a file reads (and whatever else a `self` has)."""
    return {name for names in READ.findall(path.read_text()) for name in names if name}


READS = {name_of(path): reads_of(path) for path in MODULES}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_read_and_explained(script):
    own, common = reads_of(path_of(script)), set().union(*READS.values())
    for field in fields_of(script):
        assert field.name in (own | common if field.name in SHARED else own), f"{field.name} is never read"
        assert field.metadata.get("help"), f"{field.name} has no help text"


def test_common_reads_shared_arguments_only():
    """What a script alone knows it hands over: so it can be changed without a look into common."""
    own = {field.name for script in SCRIPTS for field in fields_of(script)} - SHARED
    for path in MODULES:
        read = own & {first for first, *_ in READ.findall(path.read_text())}
        assert own and not read, f"{name_of(path)} reads {read}"


# --- scripts and configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_written_from_top_to_bottom(script):
    source = path_of(script).read_text()
    docstring, *statements = ast.parse(source).body
    kinds = [isinstance(node, ast.Import | ast.ImportFrom) for node in statements]
    assert isinstance(docstring.value, ast.Constant) and kinds == sorted(kinds, reverse=True), (
        "an import below code"
    )
    below = [node for statement in statements[sum(kinds) :] for node in ast.walk(statement)]
    assert not any(isinstance(node, ast.Import | ast.ImportFrom) for node in below), (
        "an import inside of a function"
    )
    assert not any(
        name.startswith(("train_", "experiments.train_")) for name in imports_of(path_of(script))
    ), "another script"
    assert ast.unparse(statements[-1]).startswith("if __name__ == '__main__':\n    launch(main, Args, demo=")
    banners = [
        name.removesuffix(" and reference") for name in re.findall(r"^    # --- (.+?) -+$", source, re.M)
    ]
    assert banners == ["data", "model", "the gradient of a window", "loop"]
