"""The demo data: reproducible, and free of held-out chains by a reading of its text that the generator has no part in.

`events` below reads text without any help from the generator. It must account for every number that it meets: a
sentence with a number in a form that is not listed here fails the test, so no chain can hide in an unforeseen wording.
"""

from collections.abc import Iterable, Iterator
from functools import cache
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
    *(f"prompts/{form}_{split}.jsonl" for form in ["chat", "base", "zero"] for split in ["validation", "test"]),
]

# ---------------------------------------------------------------------------------------------------------------------
# Reading numbers from text

NOUN = r"(?:nut|fig|egg|bun|pen|card|coin|ball|rider|duck)s?\b"
PATTERN = re.compile(
    rf"""
      (?P<answer>    (?:Answer:|[ ]is|\?|Now[ ](?:the[ ])?\w+[ ]has)[ ](\d+) (?![\d=+-]|[ ](?:odd|even|comes|is)\b) )
    | (?P<equation>  (?<![\d+=-]) (\d+)([+-]\d+)=(\d+)\. )
    | (?P<sum>       (?<![\d+=-]) (\d+)((?:[+-]\d+)+) (?![\d=+-]) )
    | (?P<start>     \b(?!Now)\w+[ ]has[ ](\d+)[ ]{NOUN} )
    | (?P<gain>      \b(?:He|She)[ ](?:finds|gets|buys)[ ](\d+)\.
                   | (?<![\d+=-])(\d+)[ ](?:gets?[ ]on|comes?)\. )
    | (?P<loss>      \b(?:He|She)[ ](?:loses|sells|drops|eats)[ ](\d+)\.
                   | (?<![\d+=-])(\d+)[ ](?:gets?[ ]off|goe?s?)\. )
    | (?P<counting>  Count[ ](?:up|down)[ ]by[ ]\d:[ ](\d+(?:,[ ]\d+)+)\. )
    | (?P<unchained> Which[ ]is[ ](?:more|less),[ ]\d+[ ]or[ ]\d+\?[ ]\d+[ ]is[ ](?:more|less)\.
                   | \d+[ ]is[ ](?:more|less)[ ]than[ ]\d+\.
                   | (?:Is[ ])?\d+[ ](?:is[ ])?(?:even|odd)(?:\.|[ ]or[ ]odd\?)
                   | (?:\d+|number)[ ]comes[ ](?:after|before)[ ]\d+[.?]
                   | \d[ ]legs\. )
    """,
    re.VERBOSE,
)
NUMBER_WORD = re.compile(
    r"\b(one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|half|twice|double|dozen)\b",
    re.I,
)

Chain = tuple[int, ...]  # (start, step, ...)
Event = tuple[str, list[int]]


@cache
def events(text: str) -> tuple[Event, ...]:
    """Every number of the text, in order, as (what it is, the numbers)."""
    found, end = [], 0
    for match in PATTERN.finditer(text):
        assert not re.search(r"\d", text[end : match.start()]), f"unreadable number in {text!r}"
        found.append((match.lastgroup or "", [int(number) for number in re.findall(r"[+-]?\d+", match.group())]))
        end = match.end()
    assert not re.search(r"\d", text[end:]), f"unreadable number in {text!r}"
    assert not NUMBER_WORD.search(text), f"a number in words in {text!r}"
    return tuple(found)


def chains_in(text: str) -> list[Chain]:
    """Every chain of numbers that the text asks, tells, counts or works out, with the numbers as they are written."""
    found: list[Chain] = []
    told: list[int] = []  # the story so far
    linked: list[list[int]] = []  # equations that each start with the result of the one before
    for kind, numbers in events(text):
        if kind == "sum":
            found.append(tuple(numbers))
        elif kind == "counting":
            _, *listed = numbers
            found.append((listed[0], *(after - before for before, after in zip(listed, listed[1:], strict=False))))
        elif kind == "start":
            told = numbers
        elif kind in ("gain", "loss"):
            assert told, f"a step without a start in {text!r}"
            told = [*told, numbers[0] if kind == "gain" else -numbers[0]]
            found.append(tuple(told))
        elif kind == "equation":
            linked = [*linked, numbers] if linked and linked[-1][2] == numbers[0] else [numbers]
            # A wrong result makes the later equations a chain of their own, so read the run from each of its starts.
            for first in range(len(linked)):
                found.append((linked[first][0], *(step for _, step, _ in linked[first:])))
    return found


def parts(chain: Chain) -> Iterator[Chain]:
    """The chain and every shorter one inside it."""
    for first in range(1, len(chain)):
        for last in range(first + 1, len(chain) + 1):
            yield (sum(chain[:first]), *chain[first:last])


@cache
def split_of(chain: Chain) -> str:
    """The split of a chain by the rule in data/README.md."""
    if len(set(chain[1:])) == 1:
        return "train"
    bucket = hashlib.md5(",".join(map(str, chain)).encode()).digest()[0] % 16
    return {0: "test", 1: "test", 2: "validation"}.get(bucket, "train")


def leaks(texts: Iterable[str], allowed: set[str]) -> list[tuple[Chain, str]]:
    """Every chain, or part of one, that occurs in the texts although it is of a split that is not allowed."""
    found = [(part, text) for text in texts for chain in chains_in(text) for part in parts(chain)]
    return [(part, text) for part, text in found if split_of(part) not in allowed]


# ---------------------------------------------------------------------------------------------------------------------
# Reading files


def joined(*messages: list[dict]) -> str:
    return "\n".join(message["content"] for part in messages for message in part)


def texts_of(name: str) -> list[str]:
    """Everything that a model reads as one piece: a document, a conversation, a prompt with one of its answers."""
    if name.endswith(".txt"):
        return (DATA / name).read_text(encoding="utf-8").rstrip("\n").split("\n\n")
    rows = read_rows(DATA / name)
    if name.startswith("sft"):
        return [joined(row["messages"]) for row in rows]
    if name.startswith("dpo"):
        return [joined(row["prompt"], row[answer]) for row in rows for answer in ("chosen", "rejected")]
    return [row["prompt"] if isinstance(row["prompt"], str) else joined(row["prompt"]) for row in rows]


# ---------------------------------------------------------------------------------------------------------------------
# The files


def test_running_the_generator_again_writes_the_same_bytes(tmp_path):
    subprocess.run([sys.executable, str(DATA / "make_data.py"), "--out", str(tmp_path)], check=True)
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert written == set(GENERATED)
    for name in GENERATED:
        same = (tmp_path / name).read_bytes() == (DATA / name).read_bytes()
        assert same, f"{name} differs from what the generator writes"


@pytest.mark.parametrize("name", GENERATED)
def test_no_file_contains_a_chain_of_a_later_split(name):
    allowed = {"train"}
    if "validation" in name:
        allowed |= {"validation"}
    if "test" in name:
        allowed |= {"validation", "test"}
    assert leaks(texts_of(name), allowed)[:3] == []


@pytest.mark.parametrize("name", [name for name in GENERATED if "grpo" in name or name.startswith("prompts")])
def test_questions_have_their_own_split_and_the_right_answers(name):
    """Each once in the files of prompts, where as many are in words as in symbols, and as many of two steps as of three."""
    rows, texts, split = read_rows(DATA / name), texts_of(name), Path(name).stem.split("_")[-1]
    for row, text in zip(rows, texts, strict=True):
        chain = chains_in(text)[-1]
        assert split_of(chain) == split and len(chain) in (3, 4) and row["answer"] == str(sum(chain))
    if name.startswith("prompts"):
        cells = [(row["kind"], row["steps"]) for row in rows]
        assert len(set(texts)) == len(rows) and {cells.count(cell) for cell in cells} == {len(rows) // 4}
