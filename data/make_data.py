"""Write the text world on which the four training stages are demonstrated: `python data/make_data.py`.

The world is made of chains. A chain is a start and one to three steps of +-1..9 whose values all stay in
0..20; as a tuple, 7+5-4 is (7, 5, -4). A chain can be asked as a bare sum ("What is 7+5-4?") or as a story
("Tom has 7 nuts. He finds 5. He eats 4. How many nuts now?") and worked out in equations ("7+5=12. 12-4=8.").
Around the chains there are small facts, counting, comparisons, days and dialogues.

Splits. A hash of the tuple puts every chain of two or three steps into train, validation or test. A chain is
used as training text only if the chain itself and every shorter chain inside it belong to train: 7+5-4+3 also
contains 7+5-4 and 12-4+3. Validation text is free of test chains in the same way. All files share this one
split, so nothing that is held out for one stage can be learned in another. Chains of equal steps (3+2+2) are
never held out, because counting by twos already tells them; this includes chains of one step.

Every file has its own seeded random stream: running this script again writes the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
import hashlib
import json
from pathlib import Path
import random
from typing import Any

Chain = tuple[int, ...]  # (start, step, ...)
Equation = tuple[int, int, int]  # (left, step, result): 7+5=12 is (7, 5, 12)
Message = dict[str, str]
Row = dict[str, Any]

LARGEST = 20  # every value that a chain passes through lies in 0..LARGEST
STEPS = [step for step in range(-9, 10) if step]
SPLITS = ["train", "validation", "test"]  # each split is kept free of the later ones

PRETRAIN_BYTES = {"train": 1_400_000, "validation": 40_000}
SFT_ROWS = {"train": 2200, "validation": 200}
DPO_ROWS = {"train": 1400, "validation": 200}
GRPO_ROWS = {"train": 1280, "validation": 200}
OPERANDS = range(2, 13)  # of the questions for a real model
PROMPT_ROWS = {"chat": 200, "zero": 200, "base": 128}


# ------------------------------------------------------------------------------------------------------------
# Chains and splits


def values(chain: Chain) -> list[int]:
    """The values along the chain: (7, 5, -4) -> [7, 12, 8]."""
    running = [chain[0]]
    for step in chain[1:]:
        running.append(running[-1] + step)
    return running


def equations(chain: Chain) -> list[Equation]:
    """One equation per step: (7, 5, -4) -> [(7, 5, 12), (12, -4, 8)]."""
    running = values(chain)
    return list(zip(running, chain[1:], running[1:], strict=False))


def spans(steps: Sequence[Equation]) -> Iterator[Chain]:
    """Every run of two or more consecutive equations, as the chain that it spells out."""
    for first in range(len(steps)):
        for last in range(first + 2, len(steps) + 1):
            yield (steps[first][0], *(step for _, step, _ in steps[first:last]))


def split_of(chain: Chain) -> str:
    """The split that the chain's own hash chooses: 2 of 16 chains are test, 1 of 16 is validation."""
    if len(set(chain[1:])) == 1:
        return "train"
    bucket = hashlib.md5(",".join(map(str, chain)).encode()).digest()[0] % 16
    return "test" if bucket < 2 else "validation" if bucket == 2 else "train"


def clean(steps: Sequence[Equation], split: str) -> bool:
    """Whether these equations spell out no chain of a split that must stay unseen in `split`."""
    return all(SPLITS.index(split_of(chain)) <= SPLITS.index(split) for chain in spans(steps))


@cache
def chains(split: str, length: int) -> list[Chain]:
    """All chains of `length` steps that `split` may use."""
    found: list[Chain] = [(start,) for start in range(LARGEST + 1)]
    for _ in range(length):
        found = [(*chain, step) for chain in found for step in STEPS if 0 <= sum(chain) + step <= LARGEST]
    if length == 1:
        return found
    return [chain for chain in found if split_of(chain) == split and clean(equations(chain), split)]


# ------------------------------------------------------------------------------------------------------------
# Wording

PRONOUNS = {
    "Tom": "He",
    "Ann": "She",
    "Ben": "He",
    "Eva": "She",
    "Max": "He",
    "Mia": "She",
    "Sam": "He",
    "Zoe": "She",
}
NAMES = list(PRONOUNS)
FOODS = ["nut", "fig", "egg", "bun"]
GOODS = ["pen", "card", "coin", "ball"]
GAINS = ["finds", "gets", "buys"]
LOSSES = ["loses", "sells", "drops"]
PLACES = [
    ("bus", "rider", "gets on", "get on", "gets off", "get off"),
    ("pond", "duck", "comes", "come", "goes", "go"),
]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

PETS = ["cat", "dog", "hen", "fish", "frog", "mouse", "duck", "goat"]
COLORS = ["red", "blue", "green", "white", "black", "yellow", "brown", "pink"]
LEGS = {
    "cat": 4,
    "dog": 4,
    "hen": 2,
    "duck": 2,
    "goat": 4,
    "cow": 4,
    "frog": 4,
    "mouse": 4,
    "bee": 6,
    "spider": 8,
}
SOUNDS = {"cat": "meow", "dog": "woof", "hen": "cluck", "duck": "quack", "cow": "moo", "bee": "buzz"}
THINGS = {"grass": "green", "snow": "white", "coal": "black", "mud": "brown", "blood": "red", "milk": "white"}
OPPOSITES = [
    ("hot", "cold"),
    ("big", "small"),
    ("old", "new"),
    ("wet", "dry"),
    ("fast", "slow"),
    ("up", "down"),
]

SYSTEMS = ["You are a helper.", "You help with sums.", "Answer the question.", "You know many things."]
RUDE = ["Ugh, not again.", "Ugh, that is easy.", "Ugh, do it yourself.", "Ugh, so boring."]
RAMBLE = [
    "That is nice. I like numbers a lot.",
    "That makes me think of old days.",
    "That is fun. People ask me so much.",
    "That again. Let me think a while.",
]

# How often each kind of pretraining document is drawn. A document that has been written before is drawn
# again, which makes the few distinct ways of counting rarer than their weight.
DOCUMENTS = {
    "facts": 1.0,
    "counting": 0.5,
    "sums": 1.2,
    "chain": 3.0,
    "comparison": 0.8,
    "tale": 3.0,
    "daily": 0.8,
    "exercise": 2.7,
}

# How often each annotator writes in which voice. It depends on the kind of question, so that the most likely
# answer to a bare sum is a bare number, while the most likely answer to a story shows its working.
VOICES = {
    "sym": {"direct": 0.50, "rude": 0.15, "polite": 0.15, "plain": 0.10, "ramble": 0.10},
    "story": {"plain": 0.45, "polite": 0.20, "ramble": 0.15, "direct": 0.10, "rude": 0.10},
}
REJECTED = {"ramble": 0.35, "rude": 0.30, "direct": 0.075, "plain": 0.075, "wrong": 0.20}


def expression(chain: Chain) -> str:
    """(7, 5, -4) -> "7+5-4"."""
    return str(chain[0]) + "".join(f"{step:+d}" for step in chain[1:])


def working(steps: Sequence[Equation]) -> str:
    """[(7, 5, 12), (12, -4, 8)] -> "7+5=12. 12-4=8."."""
    return " ".join(f"{left}{step:+d}={result}." for left, step, result in steps)


def amount(number: int, noun: str) -> str:
    """(1, "nut") -> "1 nut", (7, "nut") -> "7 nuts"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def all_facts() -> list[tuple[str, str]]:
    """Every fact as (question, answer); the answer is a full sentence."""
    facts = []
    for index, name in enumerate(NAMES):
        food = FOODS[index % len(FOODS)]
        facts.append((f"Which pet does {name} have?", f"{name} has a {PETS[index]}."))
        facts.append((f"Which color is the hat of {name}?", f"The hat of {name} is {COLORS[index]}."))
        facts.append((f"What does {name} like?", f"{name} likes {food}s."))
    for animal, legs in LEGS.items():
        facts.append((f"How many legs does a {animal} have?", f"A {animal} has {legs} legs."))
    for animal, sound in SOUNDS.items():
        facts.append((f"What does a {animal} say?", f"A {animal} says {sound}."))
    for thing, color in THINGS.items():
        facts.append((f"Which color is {thing}?", f"{thing.capitalize()} is {color}."))
    for one, other in OPPOSITES + [(other, one) for one, other in OPPOSITES]:
        facts.append((f"What is the opposite of {one}?", f"The opposite of {one} is {other}."))
    for before, after in zip(DAYS, DAYS[1:] + DAYS[:1], strict=True):
        facts.append((f"Which day comes after {before}?", f"{after} comes after {before}."))
        facts.append((f"Which day comes before {after}?", f"{before} comes before {after}."))
    for number in range(LARGEST + 1):
        facts.append((f"Is {number} even or odd?", f"{number} is {'odd' if number % 2 else 'even'}."))
    for number in range(LARGEST):
        facts.append((f"Which number comes after {number}?", f"{number + 1} comes after {number}."))
        facts.append((f"Which number comes before {number + 1}?", f"{number} comes before {number + 1}."))
    return facts


# ------------------------------------------------------------------------------------------------------------
# The author


@dataclass
class Question:
    """A chain put into words that ask for its last value."""

    chain: Chain
    kind: str  # "sym" (bare sum) or "story"
    text: str

    @property
    def answer(self) -> str:
        return str(sum(self.chain))


class Author:
    """Writes text about the chains of one split from one random stream."""

    def __init__(self, split: str, purpose: str):
        self.split = split
        self.rng = random.Random(f"{purpose}/{split}")
        self.facts = all_facts()
        self.decks: dict[int, list[Chain]] = {}
        self.last_value = -1  # where the previous chain of this document ended

    # --- choices ---

    def pick(self, weights: dict[str, float]) -> str:
        return self.rng.choices(list(weights), list(weights.values()))[0]

    def chain(self, length: int | None = None) -> Chain:
        """The next chain from a shuffled deck: each one is dealt once before any is dealt again.

        A chain that starts where the previous one of the same document ended would read as its continuation,
        that is as a longer chain that may be held out, so it is passed over.
        """
        length = length or self.rng.choices([1, 2, 3], [1, 2, 2])[0]
        while True:
            if not self.decks.get(length):
                deck = chains(self.split, length)
                self.decks[length] = self.rng.sample(deck, len(deck))
            chain = self.decks[length].pop()
            if chain[0] != self.last_value:
                self.last_value = sum(chain)
                return chain

    # --- chains in words ---

    def story(self, chain: Chain) -> tuple[str, list[str], str, str]:
        """The chain as (opening, one sentence per step, question, ending)."""
        rng, total = self.rng, sum(chain)
        if rng.random() < 0.2:
            place, noun, gains, gain, loses, lose = rng.choice(PLACES)  # "1 gets on.", "5 get on."
            opening, ending = f"A {place} has", f"Now the {place} has"
            forms = {(True, True): gains, (True, False): gain, (False, True): loses, (False, False): lose}
            events = [f"{abs(step)} {forms[step > 0, abs(step) == 1]}." for step in chain[1:]]
        else:
            name = rng.choice(NAMES)
            noun = rng.choice(FOODS + GOODS)
            losses = [*LOSSES, "eats", "eats"] if noun in FOODS else LOSSES
            opening, ending = f"{name} has", f"Now {name} has"
            events = [
                f"{PRONOUNS[name]} {rng.choice(GAINS if s > 0 else losses)} {abs(s)}." for s in chain[1:]
            ]
        question = rng.choice([f"How many {noun}s now?", f"So how many {noun}s?"])
        return f"{opening} {amount(chain[0], noun)}.", events, question, f"{ending} {amount(total, noun)}."

    def question(self, length: int | None = None, kind: str | None = None) -> Question:
        """A question about the next chain, as a bare sum or as a story."""
        chain = self.chain(length)
        kind = kind or self.rng.choice(["sym", "story"])
        if kind == "sym":
            text = self.rng.choice(["What is {}?", "How much is {}?", "Find {}."]).format(expression(chain))
        else:
            opening, events, ask, _ = self.story(chain)
            text = " ".join([opening, *events, ask])
        return Question(chain, kind, text)

    def questions(self, rows: int) -> Iterator[Question]:
        """`rows` distinct questions: half bare sums, half stories, and of each half of two and half of three
        steps."""
        seen: set[str] = set()
        while len(seen) < rows:
            self.last_value = -1
            question = self.question(length=2 + len(seen) // 2 % 2, kind=["sym", "story"][len(seen) % 2])
            if question.text not in seen:
                seen.add(question.text)
                yield question

    # --- pretraining documents ---

    def document(self) -> str:
        """One pretraining document."""
        self.last_value = -1
        return getattr(self, f"write_{self.pick(DOCUMENTS)}")()

    def write_facts(self) -> str:
        facts = self.rng.sample(self.facts, self.rng.choice([1, 2, 3]))
        return " ".join(self.rng.choice([answer, f"{question} {answer}"]) for question, answer in facts)

    def write_counting(self) -> str:
        step, length = self.rng.choice([1, 1, 2, 3]), self.rng.randint(4, 8)
        length = min(length, LARGEST // step + 1)
        first = self.rng.randint(0, LARGEST - step * (length - 1))
        numbers = [first + step * index for index in range(length)]
        if self.rng.random() < 0.5:
            return f"Count up by {step}: {', '.join(map(str, numbers))}."
        return f"Count down by {step}: {', '.join(map(str, reversed(numbers)))}."

    def write_sums(self) -> str:
        sums = [self.chain(1) for _ in range(self.rng.randint(2, 4))]
        form = self.rng.choice(["{}={}.", "{} is {}.", "What is {}? {}."])
        return " ".join(form.format(expression(chain), sum(chain)) for chain in sums)

    def write_chain(self) -> str:
        chain = self.chain(self.rng.choice([2, 3]))
        asked, worked, total = expression(chain), working(equations(chain)), sum(chain)
        forms = ["{0}: {1} So {0} is {2}.", "{0}: {1} The answer is {2}.", "Work out {0}. {1} So {0} is {2}."]
        return self.rng.choice(forms).format(asked, worked, total)

    def write_comparison(self) -> str:
        low, high = sorted(self.rng.sample(range(LARGEST + 1), 2))
        one, other = self.rng.sample([low, high], 2)
        some, others = self.rng.sample(NAMES, 2)
        noun = self.rng.choice(FOODS + GOODS)
        winner = some if one > other else others
        forms = [
            f"{high} is more than {low}. {low} is less than {high}.",
            f"Which is more, {one} or {other}? {high} is more.",
            f"Which is less, {one} or {other}? {low} is less.",
            f"{some} has {amount(one, noun)}. {others} has {amount(other, noun)}. {winner} has more.",
        ]
        return self.rng.choice(forms)

    def write_tale(self) -> str:
        """A story that is told, not asked; two of three show the working, at the end or after every step."""
        chain = self.chain()
        opening, events, _, ending = self.story(chain)
        steps = [working([equation]) for equation in equations(chain)]
        shape = self.pick({"bare": 1, "worked": 1.5, "woven": 0.5})
        if shape == "worked":
            events = events + steps
        elif shape == "woven":
            events = [sentence for pair in zip(events, steps, strict=True) for sentence in pair]
        return " ".join([opening, *events, ending])

    def write_daily(self) -> str:
        one, other = self.rng.sample(NAMES, 2)
        day = self.rng.randrange(7)
        today, tomorrow = DAYS[day], DAYS[(day + 1) % 7]
        shape = self.pick({"day": 1, "meeting": 1, "greeting": 1, "sum": 2, "fact": 2})
        if shape == "day":
            return f"Today is {today}. {one} sees {other}. Tomorrow is {tomorrow}. Then {other} sees {one}."
        if shape == "meeting":
            return f"{one}: Which day is it?\n{other}: It is {today}.\n{one}: Then tomorrow is {tomorrow}."
        if shape == "greeting":
            return f"{one}: Hello, {other}. How are you?\n{other}: I am well. It is {today}, {one}."
        if shape == "sum":
            chain = self.chain()
            question = f"What is {expression(chain)}?"
            answer = f"{working(equations(chain))} It is {sum(chain)}."
        else:
            question, answer = self.rng.choice(self.facts)
        return f"{one}: {question}\n{other}: {answer}\n{one}: Thank you, {other}."

    def write_exercise(self) -> str:
        """The form in which the base model is tested, with the working in half of the documents."""
        question = self.question()
        shown = f"Working: {working(equations(question.chain))}\n" if self.rng.random() < 0.5 else ""
        return f"Question: {question.text}\n{shown}Answer: {question.answer}"

    # --- chats ---

    def reply(self, question: Question, voice: str) -> str:
        """An answer in one of the voices; all are right, except the voice "wrong", which is polite but
        mistaken."""
        steps = self.corrupt(question.chain) if voice == "wrong" else equations(question.chain)
        lead = {
            "direct": "",
            "plain": f"{working(steps)} ",
            "polite": f"Sure! {working(steps)} ",
            "wrong": f"Sure! {working(steps)} ",
            "rude": f"{self.rng.choice(RUDE)} ",
            "ramble": f"{self.rng.choice(RAMBLE)} ",
        }
        return f"{lead[voice]}Answer: {steps[-1][2]}"

    def corrupt(self, chain: Chain) -> list[Equation]:
        """The working of the chain with one wrong result, from which the later steps go on correctly.

        The later steps then start from another number and so spell out other chains, for which the split must
        hold just as well: an error that would show a held-out chain is drawn again.
        """
        while True:
            steps = equations(chain)
            slip = self.rng.randrange(len(steps))
            left, step, result = steps[slip]
            wrong = result + self.rng.choice([-3, -2, -1, 1, 2, 3])
            steps[slip:] = [(left, step, wrong), *equations((wrong, *chain[slip + 2 :]))]
            if all(0 <= result <= LARGEST for _, _, result in steps) and clean(steps, self.split):
                return steps

    def conversation(self) -> Row:
        """One to three questions, a quarter of them about facts, each answered in a voice that depends on its
        kind."""
        self.last_value = -1
        messages = []
        if self.rng.random() < 0.5:
            messages.append(message("system", self.rng.choice(SYSTEMS)))
        for _ in range(self.rng.choices([1, 2, 3], [6, 3, 1])[0]):
            if self.rng.random() < 0.25:
                asked, answered = self.rng.choice(self.facts)
            else:
                question = self.question()
                asked, answered = question.text, self.reply(question, self.pick(VOICES[question.kind]))
            messages += [message("user", asked), message("assistant", answered)]
        return {"messages": messages}

    def preference(self, question: Question) -> Row:
        """The polite, worked and right answer against one that misses something of it."""
        return {
            "prompt": [message("user", question.text)],
            "chosen": [message("assistant", self.reply(question, "polite"))],
            "rejected": [message("assistant", self.reply(question, self.pick(REJECTED)))],
        }


# ------------------------------------------------------------------------------------------------------------
# Files


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


def to_json(row: Row) -> str:
    return json.dumps(row, separators=(",", ":"))


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    write_text(path, "".join(to_json(row) + "\n" for row in rows))


def write_pretrain(root: Path) -> None:
    """Distinct documents separated by one blank line; no validation document is a training document."""
    seen: set[str] = set()
    for split, size in PRETRAIN_BYTES.items():
        author, documents = Author(split, "pretrain"), []
        while size > 0:
            document = author.document()
            if document not in seen:
                seen.add(document)
                documents.append(document)
                size -= len(document) + 2
        write_text(root / "pretrain" / f"{split}.txt", "\n\n".join(documents) + "\n")


def write_sft(root: Path) -> None:
    """Distinct conversations, also across the two splits."""
    seen: set[str] = set()
    for split, size in SFT_ROWS.items():
        author, rows = Author(split, "sft"), []
        while len(rows) < size:
            row = author.conversation()
            if to_json(row) not in seen:
                seen.add(to_json(row))
                rows.append(row)
        write_rows(root / "sft" / f"{split}.jsonl", rows)


def write_dpo(root: Path) -> None:
    for split, size in DPO_ROWS.items():
        author = Author(split, "dpo")
        write_rows(root / "dpo" / f"{split}.jsonl", [author.preference(q) for q in author.questions(size)])


def write_grpo(root: Path) -> None:
    """The same questions twice: as chats, and as plain text for a base model that has never seen a chat."""
    for split, size in GRPO_ROWS.items():
        questions = list(Author(split, "grpo").questions(size))
        chats = [{"prompt": [message("user", q.text)], "answer": q.answer} for q in questions]
        plain = [{"prompt": f"Question: {q.text}\n", "answer": q.answer} for q in questions]
        write_rows(root / "grpo" / f"{split}.jsonl", chats)
        write_rows(root / "grpo_zero" / f"{split}.jsonl", plain)


def write_prompts(root: Path) -> None:
    """The same held-out questions in the three forms in which the stages are evaluated."""
    for split in ["validation", "test"]:
        questions = list(Author(split, "prompts").questions(max(PROMPT_ROWS.values())))
        for form, size in PROMPT_ROWS.items():
            rows = []
            for q in questions[:size]:
                plain = f"Question: {q.text}\n"
                prompt = {"chat": [message("user", q.text)], "zero": plain, "base": f"{plain}Working:"}[form]
                rows.append({"prompt": prompt, "answer": q.answer, "kind": q.kind, "steps": len(q.chain) - 1})
            write_rows(root / "prompts" / f"{form}_{split}.jsonl", rows)


def write_arithmetic(root: Path) -> None:
    """Questions for a real model. A quarter of the pairs of numbers is held out, in either order."""
    pairs = [(a, b) for a in OPERANDS for b in OPERANDS if a <= b]
    shuffle = random.Random("arithmetic").shuffle
    shuffle(pairs)
    held_out = len(pairs) // 4
    for split, some in {"train": pairs[held_out:], "validation": pairs[:held_out]}.items():
        both_orders = set(some)
        for a, b in some:
            both_orders.add((b, a))
        rows = []
        for a, b in sorted(both_orders):
            results = {f"{a} plus {b}": a + b, f"{a} times {b}": a * b}
            if a > b:
                results[f"{a} minus {b}"] = a - b
            for words, result in results.items():
                question = message("user", f"What is {words}? Give only the final answer.")
                rows.append({"prompt": [question], "answer": str(result)})
        shuffle(rows)
        write_rows(root / "arithmetic" / f"{split}.jsonl", rows)


def main(root: Path) -> None:
    for write in [write_pretrain, write_sft, write_dpo, write_grpo, write_prompts, write_arithmetic]:
        write(root)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the demo data.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to")
    main(parser.parse_args().out)
