"""Tasks of reasoning-gym as rows, its own scorers as rewards.

    pip install reasoning-gym
    python -m tools.reasoning_tasks spell_backward outputs/spell --rows 5000 max_word_len=6
    python train_grpo.py --dataset_name outputs/spell --reward_funcs tools/reasoning_tasks.py:score ...

What follows as NAME=VALUE are settings of the task. The folder gets train.jsonl and validation.jsonl; no
question of the second is in the first. A row has a chat, `prompt` and `completion`, for SFT and GRPO; `text`,
question and answer, for pretraining; and what `score` makes the task from anew, since reasoning-gym's entries
hold what a file does not.
"""

import argparse
import functools
import json
from pathlib import Path
from typing import Any

from common.errors import UserError, say
import yaml

from tools import as_command

Item = dict[str, Any]  # question, answer, metadata


@functools.cache
def dataset_of(task: str) -> Any:
    """The dataset of a JSON text: name, seed, size and other settings. Raises UserError if there is none."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(f"{error}: pip install reasoning-gym") from None
    try:
        return reasoning_gym.create_dataset(**json.loads(task))
    except (ValueError, TypeError, AssertionError) as error:  # how it refuses a name, or a setting
        raise UserError(f"reasoning-gym: {error}") from None


@functools.lru_cache(maxsize=100_000)
def item_of(task: str, index: int) -> Item:
    return dataset_of(task)[index]


def row_of(task: str, index: int) -> dict[str, Any]:
    item = item_of(task, index)
    question, answer = item["question"], item["answer"]
    row = {"prompt": [{"role": "user", "content": question}], "task": task, "index": index}
    if answer is None:  # several are right, and none is named
        return row
    return row | {"completion": [{"role": "assistant", "content": answer}], "text": f"{question}\n{answer}"}


def split(task: str, rows: int, held_out: int) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows): each question once, the held-out ones first, as they come."""
    found: dict[str, dict] = {}
    for index in range(rows + held_out):
        row = row_of(task, index)
        found.setdefault(row["prompt"][0]["content"], row)
    different = list(found.values())
    return different[held_out:], different[:held_out]


def score(prompts: list, completions: list, task: list[str], index: list[int], **columns: Any) -> list[float]:
    """The task's own score of each answer, 0 to 1; what stands between <answer> tags, if there are any."""
    from reasoning_gym.utils import extract_answer

    scores = []
    for prompt, completion, name, i in zip(prompts, completions, task, index, strict=True):
        item, text = item_of(name, i), completion[0]["content"].strip()
        if item["question"] != prompt[-1]["content"]:
            raise UserError("this reasoning-gym makes other questions than the one that wrote the rows")
        try:
            points = dataset_of(name).score_answer(extract_answer(text) or text, entry=item)
        except ValueError:  # some scorers expect a number
            points = 0.0
        scores.append(float(points))
    return scores


def solved(*args: Any, **columns: Any) -> list[float]:
    """1 for an answer with the full score, otherwise 0."""
    return [float(value >= 1) for value in score(*args, **columns)]


def main() -> None:
    how = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser("python -m tools.reasoning_tasks", **how)
    parser.add_argument("task", help="its name in reasoning-gym")
    parser.add_argument("folder", type=Path)
    parser.add_argument("settings", nargs="*", help="NAME=VALUE, of the task")
    parser.add_argument("--rows", type=int, default=5000, help="for training; fewer if questions repeat")
    parser.add_argument("--held_out", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_intermixed_args()
    settings = {}
    for setting in args.settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"{setting}: expected NAME=VALUE")
        settings[name] = yaml.safe_load(value)
    task = json.dumps({"name": args.task, "seed": args.seed, "size": args.rows + args.held_out} | settings)
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "validation"), split(task, args.rows, args.held_out), strict=True):
        (args.folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
        say(f"{args.folder / name}.jsonl: {len(rows):,} rows")


if __name__ == "__main__":
    as_command(main)
