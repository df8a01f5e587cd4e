"""The key of the cache: what `encode` depends on makes another key, and what it does not depend on makes none."""

import dataclasses
import importlib.util
import linecache
import sys
from dataclasses import dataclass, field
from pathlib import Path

from common.args import CommonArgs, may_change
from common.data import cache_key as keys
from common.data.cache_key import args_read, cache_key, constants
from common.data.sources import Source
from common.errors import UserError

import pytest
from transformers import AutoTokenizer


@dataclass
class Args(CommonArgs):
    max_length: int = field(default=8, metadata={"help": ""})
    train_on: str = field(default="all_turns", metadata={"help": ""})
    beta: float = field(default=0.1, metadata={"help": "", "may_change": True})


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained("data/base_model")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """module(code): a new module with that code, in a file."""
    count = 0

    def load(code, name="stage"):
        nonlocal count
        count += 1
        path = tmp_path / f"{name}_{count}.py"
        path.write_text(code)
        spec = importlib.util.spec_from_file_location("stage", path)
        made = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "stage", made)  # where the source of a class is looked for
        spec.loader.exec_module(made)
        return made

    return load


def read(encode, **settings):
    return set(args_read(encode, Args(**settings)))


EVERYTHING = (
    {name.name for name in dataclasses.fields(Args)}
    - {"beta"}
    - {name for name, meaning in may_change(CommonArgs).items() if meaning}
)

# --- which arguments are read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, expected",
    [
        ("def encode(row, tokenizer, args):\n    return []", set()),
        ("def encode(row, tokenizer, args):\n    return [args.max_length]", {"max_length"}),
        ("def encode(row, tokenizer, a):\n    return [a.max_length, a.seed]", {"max_length", "seed"}),
        ("def encode(row, tokenizer, args):\n    return [args.beta]", {"beta"}),  # it may change, but here it does matter
        ("def encode(row, tokenizer, args):\n    return [i for i in row if i < args.max_length]", {"max_length"}),
        ("def encode(row, tokenizer, args):\n    def f():\n        return args.max_length\n    return f()", {"max_length"}),
        ("def encode(row, tokenizer, args):\n    return args.train_on.split()", {"train_on"}),
        ("def encode(row, tokenizer, args):\n    return f'{args.train_on}'", {"train_on"}),
        ("def encode(row, tokenizer, *, args):\n    return args.train_on", {"train_on"}),
    ],
)
def test_the_arguments_that_encode_reads(module, code, expected):
    assert read(module(code).encode) == expected


CALLS = """
def encode(row, tokenizer, args):
    return [ids(row, {call}), args.train_on]

def ids(row, given=None, *, options=None):
    return given.max_length if row else longer(options, row)

def longer(a, b):
    return a.seed + (longer(a, b) if b else 0)

def not_called(args):
    return args.learning_rate
"""


@pytest.mark.parametrize(
    "call, expected",
    [
        ("args", {"train_on", "max_length"}),
        ("given=args", {"train_on", "max_length"}),
        ("None, options=args", {"train_on", "seed"}),
        ("args.max_steps", {"train_on", "max_steps"}),
    ],
)
def test_the_arguments_that_functions_of_its_module_read(module, call, expected):
    assert read(module(CALLS.format(call=call)).encode) == expected


@pytest.mark.parametrize(
    "line",
    [
        "return len(vars(args))",
        "return getattr(args, 'max_length')",
        "a = args; return a.max_length",
        "args = args or 3; return args",
        "return [args]",
        "return other(args)",
        "return dataclasses.asdict(args)",
        "return helper(*[args])",
        "return helper(**{'args': args})",
        "return (lambda: args)().max_length",
        "return args.missing",
        "return args.__class__()",
        "args.max_length = 3",
    ],
)
def test_where_the_arguments_go_somewhere_else_all_count_that_are_not_marked(module, line):
    code = f"import dataclasses\n\ndef helper(args=None):\n    return args.seed\n\ndef encode(row, tokenizer, args):\n    {line}\n"
    made = module("def other(args):\n    return args.max_length\n")
    stage = module(code)
    stage.other = made.other
    made.other.__module__ = "another"
    assert read(stage.encode) == EVERYTHING
    assert "beta" not in EVERYTHING and "max_length" in EVERYTHING


def test_a_function_whose_source_does_not_stand_alone_is_taken_to_read_everything():
    assert read([lambda row, tokenizer, args: args.seed][0]) == EVERYTHING
    assert read(lambda row, tokenizer: []) == EVERYTHING


# --- which constants are read ---------------------------------------------------------------------------------------

CONSTANTS = """
import re

{line}
OTHER = 1

def encode(row, tokenizer, args):
    return [word(w) for w in row]

def word(w):
    return [VALUE for _ in w]

def not_called():
    return OTHER
"""


@pytest.mark.parametrize(
    "first, second",
    [
        ("VALUE = 1", "VALUE = 2"),
        ("VALUE = 1", "VALUE = 1.0"),
        ("VALUE = 'a'", "VALUE = 'b'"),
        ("VALUE = True", "VALUE = False"),
        ("VALUE = None", "VALUE = 0"),
        ("VALUE = (1, 'a')", "VALUE = ('a', 1)"),
        ("VALUE = [1, [2]]", "VALUE = [1, [3]]"),
        ("VALUE = {'a': (1,)}", "VALUE = {'a': (2,)}"),
        ("VALUE = {'a': 1}", "VALUE = {'b': 1}"),
        ("VALUE = {'a', 'b'}", "VALUE = {'a', 'c'}"),
        ("VALUE = re.compile('a')", "VALUE = re.compile('a', re.I)"),
    ],
)
def test_a_constant_that_encode_reads_is_part_of_the_key(module, tokenizer, first, second):
    source = Source("data/sft/train.jsonl")
    found = [
        cache_key(source, module(CONSTANTS.format(line=line)).encode, tokenizer, Args(), None)
        for line in (first, first, second, first + "\nOTHER_VALUE = 3", first.replace("VALUE", "UNUSED") + "\n" + first)
    ]
    assert found[0] == found[1] == found[3] == found[4] != found[2]


def test_values_that_are_not_simple_are_left_out_and_closures_are_not(module):
    stage = module(CONSTANTS.format(line="VALUE = [object()]"))
    assert constants(stage.encode) == {}

    def made(limit):
        def encode(row, tokenizer, args):
            return row[:limit]

        return encode

    assert constants(made(3)) != constants(made(4)) and constants(made(3)) == constants(made(3))


def test_a_set_has_the_same_key_in_each_process(module):
    values = {f"word {i}" for i in range(50)}
    a, b = (
        module(CONSTANTS.format(line=f"VALUE = {{{', '.join(map(repr, order))}}}")) for order in (values, sorted(values))
    )
    assert constants(a.encode) == constants(b.encode)


# --- the key --------------------------------------------------------------------------------------------------------


def test_the_value_of_an_argument_that_is_read_makes_another_key_and_of_others_does_not(module, tokenizer):
    encode = module("def encode(row, tokenizer, args):\n    return [args.max_length]\n").encode
    source = Source("data/sft/train.jsonl")

    def key(**settings):
        return cache_key(source, encode, tokenizer, Args(**settings), None)

    assert key() == key(train_on="last_turn") == key(seed=3) == key(beta=2.0) == key(learning_rate=1.0)
    assert len({key(), key(max_length=9), key(max_length=10)}) == 3


def test_what_is_marked_as_without_influence_makes_no_other_key_where_all_arguments_count(module, tokenizer):
    encode = module("def encode(row, tokenizer, args):\n    return [vars(args)]\n").encode
    source = Source("data/sft/train.jsonl")

    def key(**settings):
        return cache_key(source, encode, tokenizer, Args(**settings), None)

    assert key() == key(beta=2.0) and len({key(), key(max_length=9), key(train_on="last_turn")}) == 3


def test_every_file_of_the_data_wing_is_part_of_the_key(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    for path in Path(keys.__file__).parent.glob("*.py"):
        (folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(keys, "__file__", str(folder / "cache_key.py"))
    before = keys.versions()
    assert len(before) == len(list(folder.glob("*.py"))) + 2 > 15
    for path in sorted(folder.glob("*.py")):
        text = path.read_text()
        path.write_text(text + "\n")
        assert keys.versions() != before
        path.write_text(text)
    assert keys.versions() == before


def test_libraries_of_another_version_make_another_key(monkeypatch):
    before = keys.versions()
    for library in ("transformers", "tokenizers"):
        monkeypatch.setattr(keys, "version", lambda name, library=library: "9" if name == library else "1")
        assert keys.versions() != before
        before = keys.versions()


def test_encode_has_to_be_a_function(tokenizer):
    with pytest.raises(UserError, match=r"encode is .*; expected a function of \(row, tokenizer, args\)"):
        cache_key(Source("data/sft/train.jsonl"), str.split, tokenizer, Args(), None)


USES = """
import functools
import my_helper
from my_helper import scale

class Settings:
    factor = 1
    def times(self, x):
        return x * self.factor

settings = Settings()

@functools.lru_cache
def remembered(x):
    return x + 1

def encode(row, tokenizer, args):
    return [{expression}]
"""
HELPER = "from my_other import OFFSET\n\nSCALE = 1\n\ndef scale(x):\n    return x * SCALE + OFFSET\n"


@pytest.mark.parametrize(
    "expression, old, new",
    [
        ("scale(1)", "SCALE = 1", "SCALE = 3"),
        ("my_helper.scale(1)", "x * SCALE", "x + SCALE"),
        ("scale(1)", "OFFSET = 1", "OFFSET = 2"),  # of a module that the helper imports
        ("Settings.factor", "factor = 1", "factor = 7"),
        ("settings.times(2)", "x * self.factor", "x - self.factor"),
        ("remembered(1)", "x + 1", "x + 3"),
    ],
)
def test_all_code_of_ones_own_that_encode_uses_is_part_of_the_key(
    module, tokenizer, tmp_path, monkeypatch, expression, old, new
):
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for edit in (lambda text: text, lambda text: text.replace(old, new), lambda text: text + "\n# not of any weight\n"):
        for name in ("my_helper", "my_other"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        linecache.clearcache()
        (tmp_path / "my_other.py").write_text(edit("OFFSET = 1\n") if "OFFSET" in old else "OFFSET = 1\n")
        (tmp_path / "my_helper.py").write_text(edit(HELPER) if old in HELPER else HELPER)
        code = USES.replace("{expression}", expression)
        encode = module(edit(code) if old in code else code).encode
        found.append(cache_key(Source("data/sft/train.jsonl"), encode, tokenizer, Args(), None))
    assert found[0] != found[1]


def test_code_of_the_libraries_is_in_the_key_by_their_versions(module):
    code = "import numpy as np\nimport re\n\ndef encode(row, tokenizer, args):\n    return [np.array(1), re.sub('a', 'b', 'c')]\n"
    assert len(keys.source_code(module(code).encode)) == 1
