"""The house stays plain: what imports what, how much there is and how dense, that every flag is read, that scripts
read the same."""

import ast
import dataclasses
import functools
import importlib
import io
from pathlib import Path
import re
import sys
import tokenize
from typing import NamedTuple

from common.args import CommonArgs
import pytest

from tests.conftest import EXPERIMENTS, ROOT, module_of, run_script
from tests.conftest import path_of as path_of_stage

FOUR = ["train_pretrain", "train_sft", "train_dpo", "train_grpo"]
SCRIPTS = [*FOUR, *map(module_of, EXPERIMENTS)]
COMMON = ROOT / "common"
PAGE = COMMON / "run" / "parts" / "page"  # of report.html
MODULES = sorted(COMMON.rglob("*.py"))
SHARED = {field.name for field in dataclasses.fields(CommonArgs)}
# From the ground up: a module imports what stands below it, and modules of its own wing.
FLOORS = [
    {"errors", "losses", "other_names"},
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
# Slow to import, or optional: in functions only.
SLOW = {
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "huggingface_hub",
    "pandas",
    "peft",
    "pyarrow",
    "tokenizers",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers",
}
IN_FUNCTIONS = {
    "common.model.varlen"
}  # stands on a kernel whose import takes a second, and is imported so itself


# --- the measures -------------------------------------------------------------------------------------------


class Limits(NamedTuple):
    """The most that is allowed. A formatter changes none of it: comments, docstrings and blank lines do not count,
    and a statement is one logical line."""

    tokens: int  # of code
    per_statement: float  # tokens
    comprehensions: float  # per 1,000 tokens
    nested: float  # of these, per 1,000 tokens: with another inside, or several `for`
    densest: float  # tokens a statement of any file with at least 50 statements


LIMITS = {
    "common": Limits(109_200, 10.8, 3.4, 0.05, 13.9),
    "tests": Limits(215_600, 15.1, 7.1, 0.8, 39.2),
    "tools": Limits(23_900, 11.1, 6.5, 0.6, 14.6),
    "experiments": Limits(24_000, 13.2, 5.0, 0.5, 15.0),
    "benchmarks": Limits(42_430, 14.0, 6.5, 0.8, 17.6),
    "train_pretrain.py": Limits(1_320, 12.2, 0.0, 0.0, 12.2),
    "train_sft.py": Limits(780, 10.6, 0.0, 0.0, 10.6),
    "train_dpo.py": Limits(1_350, 13.3, 0.0, 0.0, 13.3),
    "train_grpo.py": Limits(2_460, 13.7, 3.3, 0.0, 13.7),
}
PAGE_LINES = 1_600  # of JavaScript, style and HTML


def path_of(script: str) -> Path:
    return path_of_stage(script.split("train_")[1])


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


class Count(NamedTuple):
    """What there is in a file."""

    tokens: int
    statements: int
    comprehensions: int
    nested: int


NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
HAS_DOCSTRING = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSION = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@functools.cache
def count(path: Path) -> Count:
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    docstring_lines = set()
    for node in nodes:
        if isinstance(node, HAS_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            docstring_lines.update(range(docstring.lineno, docstring.end_lineno + 1))
    tokens = statements = 0
    in_statement = 0  # tokens of the statement that is being read
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:  # the end of a statement, or of a docstring
            tokens += in_statement
            statements += in_statement > 0
            in_statement = 0
        elif token.type not in NO_CODE and token.start[0] not in docstring_lines:
            in_statement += 1
    comprehensions = nested = 0
    for node in nodes:
        if isinstance(node, COMPREHENSION):
            inside = [other for other in ast.walk(node) if isinstance(other, COMPREHENSION)]
            comprehensions += 1
            nested += len(inside) > 1 or len(node.generators) > 1
    return Count(tokens, statements, comprehensions, nested)


# --- what imports what --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_down(path):
    name = name_of(path)
    for module in filter(is_ours, imports_of(path)):
        assert module in NAMES, f"{name} imports {module}: a script, or nothing"
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


def test_importing_common_imports_nothing_slow():
    """So that --help and a mistake are answered at once: what is slow, or may be missing, is imported in functions."""
    assert IN_FUNCTIONS < NAMES
    modules = sorted(NAMES - IN_FUNCTIONS)
    code = f"import importlib, sys\nfor name in {modules}:\n    importlib.import_module(name)\nprint(*sys.modules)"
    run = run_script([sys.executable, "-c", code])
    assert run.returncode == 0, run.stderr
    assert not set(run.stdout.split()) & (SLOW | IN_FUNCTIONS)


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


# --- how much there is, and how dense -----------------------------------------------------------------------


@pytest.mark.parametrize("part", LIMITS)
def test_the_code_is_plain(part):
    paths = sorted((ROOT / part).rglob("*.py")) or [ROOT / part]
    counts = {path: count(path) for path in paths}
    tokens, statements, comprehensions, nested = map(sum, zip(*counts.values(), strict=True))
    dense = {path: one.tokens / one.statements for path, one in counts.items() if one.statements >= 50}
    found = Limits(
        tokens,
        tokens / statements,
        1000 * comprehensions / tokens,
        1000 * nested / tokens,
        max(dense.values()),
    )
    for name, most in LIMITS[part]._asdict().items():
        value = getattr(found, name)
        assert value <= most, (
            f"{part}: {name} {value:.4g}, at most {most}; densest: {max(dense, key=dense.get)}"
        )


def test_the_page_of_a_report_is_short():
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in PAGE.iterdir())
    assert lines <= PAGE_LINES


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
