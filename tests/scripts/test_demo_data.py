"""The demo data: reproducible, and free of held-out chains by a reading of its text that the generator has no
part in."""

from collections.abc import Iterator
import hashlib
from pathlib import Path
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT, read_rows

DATA = ROOT / "data"
GENERATED = [
    *(f"pretrain/{split}.txt" for split in ["train", "validation"]),
    *(f"{stage}/{s}.jsonl" for stage in ["sft", "dpo", "grpo", "grpo_zero"] for s in ["train", "validation"]),
    *(
        f"prompts/{form}_{split}.jsonl"
        for form in ["chat", "base", "zero"]
        for split in ["validation", "test"]
    ),
]
ARITHMETIC = ["arithmetic/train.jsonl", "arithmetic/validation.jsonl"]
# A story and a working in symbols, one after the other: `has 3 nuts. He finds 2.` and `3+2=5. 5-1=4.` are 3+2
# and 3+2-1.
IN_SYMBOLS = [
    (r"has (\d+) \w+\.", r"\1"),
    (r" (?:He|She) (?:finds|gets|buys) (\d+)\.", r"+\1"),
    (r" (?:He|She) (?:loses|sells|drops|eats) (\d+)\.", r"-\1"),
    (r" (\d+) (?:gets? on|comes?)\.", r"+\1"),
    (r" (\d+) (?:gets? off|goe?s?)\.", r"-\1"),
    (r"=(\d+)\. \1(?=[+-])", ""),
]

Chain = tuple[int, ...]  # (start, step, ...)


def chains_in(text: str) -> list[Chain]:
    for said, symbols in IN_SYMBOLS:
        text = re.sub(said, symbols, text)
    return [tuple(map(int, re.findall(r"[+-]?\d+", found))) for found in re.findall(r"\d+(?:[+-]\d+)+", text)]


def parts(chain: Chain) -> Iterator[Chain]:
    """The chain and every shorter one inside it."""
    for first in range(1, len(chain)):
        for last in range(first + 1, len(chain) + 1):
            yield (sum(chain[:first]), *chain[first:last])


def split_of(chain: Chain) -> str:
    """The split of a chain by the rule in data/README.md."""
    if len(set(chain[1:])) == 1:
        return "train"
    bucket = hashlib.md5(",".join(map(str, chain)).encode()).digest()[0] % 16
    return {0: "test", 1: "test", 2: "validation"}.get(bucket, "train")


def contents_of(value) -> str:
    """The texts of a row, of its messages too."""
    if isinstance(value, dict):
        return "\n".join(contents_of(part) for name, part in value.items() if name != "role")
    return "\n".join(map(contents_of, value)) if isinstance(value, list) else str(value)


def texts_of(name: str) -> list[str]:
    if name.endswith(".txt"):
        return (DATA / name).read_text(encoding="utf-8").split("\n\n")
    return [contents_of(row) for row in read_rows(DATA / name)]


def test_running_the_generator_again_writes_the_same_bytes(tmp_path):
    subprocess.run([sys.executable, str(DATA / "make_data.py"), "--out", str(tmp_path)], check=True)
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {*GENERATED, *ARITHMETIC}
    for name in written:
        same = (tmp_path / name).read_bytes() == (DATA / name).read_bytes()
        assert same, f"{name} differs from what the generator writes"


def test_no_pair_of_numbers_of_the_real_model_is_in_both_splits():
    pairs = []
    for name in ARITHMETIC:
        found = set()
        for row in read_rows(DATA / name):
            a, word, b = row["prompt"][0]["content"].removeprefix("What is ").split("?")[0].split()
            result = {"plus": int(a) + int(b), "minus": int(a) - int(b), "times": int(a) * int(b)}[word]
            assert row["answer"] == str(result)
            found.add(frozenset({int(a), int(b)}))
        pairs.append(found)
    train, validation = pairs
    assert train.isdisjoint(validation) and len(train | validation) == 66


@pytest.mark.parametrize("name", GENERATED)
def test_no_file_contains_a_chain_of_a_later_split(name):
    later = {"test": set(), "validation": {"test"}}.get(
        Path(name).stem.split("_")[-1], {"validation", "test"}
    )
    found = [(chain, text) for text in texts_of(name) for chain in chains_in(text)]
    assert len(found) > 100
    assert [(chain, text) for chain, text in found if later & set(map(split_of, parts(chain)))][:3] == []


@pytest.mark.parametrize("name", [name for name in GENERATED if "grpo" in name or name.startswith("prompts")])
def test_questions_have_their_own_split_and_the_right_answers(name):
    split = Path(name).stem.split("_")[-1]
    for row, text in zip(read_rows(DATA / name), texts_of(name), strict=True):
        (chain,) = chains_in(text)
        assert split_of(chain) == split and len(chain) in (3, 4) and row["answer"] == str(sum(chain))
