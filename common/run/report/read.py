"""Incremental reading of an output folder: each look reads only the lines added since the last one."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.run.report.thin import Curve, Spread

import yaml

POINTS = 800  # per curve
AXIS = 400  # steps whose tokens and seconds are kept; values between them are interpolated
CURVES = 300  # distinct metrics
EVALUATIONS = 16  # evaluations whose samples are kept
ROLLOUTS = 24  # rollouts whose completions are kept
PROMPTS = 400  # prompts per evaluation whose text is kept
EVENTS = 64  # per kind
TEXT = 1500  # characters of a completion or a prompt
FILES = ("metrics", "samples", "completions", "events", "regression")
SUITES = 25  # evaluations of a suite that are kept: the first one and the last ones
SCORES_OF_A_SAMPLE = ("step", "temperature", "prompt", "completion")  # all other fields of a line are scores

Row = dict[str, Any]


class Lines:
    """The lines added to a JSON-lines file since the last look, skipping incomplete ones and those that are no objects."""

    def __init__(self, path: Path):
        self.path, self.offset = path, 0

    def __iter__(self) -> Iterator[Row]:
        if not self.path.is_file():
            return
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict) and is_number(row.get("step")):
                    yield row


class Folder:
    """A run's output folder. Each `update()` reads what is new; nothing in it is executed or trusted."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._files = {name: Lines(self.path / f"{name}.jsonl") for name in FILES}
        self.curves: dict[str, Curve] = {}
        self.axis: Spread[tuple[float, float, float | None]] = Spread(AXIS)  # (step, tokens, seconds)
        self.first_eval: dict[str, float] = {}
        self.last_eval: dict[str, float] = {}
        self.last: Row = {}
        self.evaluations: Spread[list[Row]] = Spread(EVALUATIONS)  # the samples of each evaluation
        self.rollouts: Spread[list[Row]] = Spread(ROLLOUTS)  # the completions of each rollout
        self.events: dict[str, Spread[Row]] = {}
        self._samples: list[Row] = []  # of the last step read, to which more may be added
        self._completions: list[Row] = []
        self.regression: list[Row] = []
        self.table: list[dict[str, Any]] = []  # the settings as a page shows them; they never change

    def update(self) -> None:
        for row in self._files["metrics"]:
            self._metrics(row)
        for row in self._files["samples"]:
            number = len(self._samples) if self._samples and self._samples[0]["step"] == row["step"] else 0
            self._samples = _group(self._samples, sample_of(row, number), self.evaluations)
        for row in self._files["completions"]:
            self._completions = _group(self._completions, completion_of(row), self.rollouts)
        for row in self._files["events"]:
            if isinstance(row.get("kind"), str):
                self.events.setdefault(row["kind"], Spread(EVENTS)).add(row)
        for row in self._files["regression"]:
            self.regression = [*_without_cases(self.regression), row]

    def _metrics(self, row: Row) -> None:
        step = row["step"]
        values = {name: value for name, value in row.items() if name != "step" and (value is None or is_number(value))}
        evaluated = {name: v for name, v in values.items() if name.startswith("eval_") and v is not None}
        self.first_eval = evaluated | self.first_eval
        self.last_eval |= evaluated
        self.last |= {"step": step} | {name: value for name, value in values.items() if value is not None}
        if is_number(row.get("num_tokens")):
            self.axis.add((step, row["num_tokens"], row.get("seconds") if is_number(row.get("seconds")) else None))
        for name, value in values.items():
            if name not in self.curves and len(self.curves) < CURVES:
                self.curves[name] = Curve(POINTS)
            if name in self.curves:
                self.curves[name].add(step, value)

    def samples(self) -> list[list[Row]]:
        """The samples of evaluations, oldest first, always including the last evaluation."""
        return _with(self.evaluations, self._samples)

    def completions(self) -> list[list[Row]]:
        """The completions of rollouts, oldest first, always including the last rollout."""
        return _with(self.rollouts, self._completions)

    def happened(self) -> list[Row]:
        """The events, oldest first, with frequent kinds thinned out."""
        return sorted((row for kind in self.events.values() for row in kind.items()), key=time_of)

    # --- what is written once ---------------------------------------------------------------------------------------

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """args.yaml, which a run writes first."""
        return _object(_yaml, self.path / "args.yaml")

    def read(self, name: str) -> dict[str, Any]:
        """The object in a JSON file; {} if there is none."""
        return _object(json.loads, self.path / name)


def sample_of(row: Row, number: int) -> Row:
    """A line of samples.jsonl with texts truncated; after the first PROMPTS lines of an evaluation, without texts."""
    scores = {n: v for n, v in row.items() if n not in SCORES_OF_A_SAMPLE and (v is None or is_number(v))}
    key = json.dumps([row.get("prompt"), row.get("temperature")], sort_keys=True, ensure_ascii=False)
    kept = {"step": row["step"], "key": key if number < PROMPTS else hash(key), "scores": scores}
    if number < PROMPTS:
        kept |= {"prompt": prompt_text(row.get("prompt")), "text": cut(row.get("completion"))}
        kept["temperature"] = row.get("temperature")
    return kept


def completion_of(row: Row) -> Row:
    """A line of completions.jsonl with texts truncated."""
    rewards = row.get("rewards") if isinstance(row.get("rewards"), dict) else {}
    kept = {name: row.get(name) if is_number(row.get(name)) else None for name in ("reward", "advantage")}
    kept |= {"step": row["step"], "prompt": prompt_text(row.get("prompt")), "text": cut(row.get("completion"))}
    scores = {str(name): value for name, value in rewards.items() if value is None or is_number(value)}
    return kept | {"rewards": scores, "cut": row.get("finished") is False}


def prompt_text(prompt: Any) -> str:
    """A prompt as text, also if it is a list of chat messages."""
    if isinstance(prompt, list):
        turns = [turn for turn in prompt if isinstance(turn, dict)]
        if len(turns) == 1:
            return cut(turns[0].get("content"))
        return cut("\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in turns))
    return cut(prompt)


def cut(text: Any, limit: int = TEXT) -> str:
    text = text if isinstance(text, str) else "" if text is None else str(text)
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters)"


def _without_cases(suites: list[Row]) -> list[Row]:
    """Earlier evaluations of a suite without their cases: only the last evaluation's cases are shown."""
    kept = [*suites[:1], *suites[1:][-(SUITES - 2) :]]
    return [{"step": row["step"], "groups": row.get("groups")} for row in kept]


def _group(group: list[Row], row: Row, groups: Spread[list[Row]]) -> list[Row]:
    """The group of consecutive rows of one step that `row` belongs to. A completed group is added to `groups`."""
    if group and group[0]["step"] == row["step"]:
        group.append(row)
        return group
    if group:
        groups.add(group)
    return [row]


def _with(groups: Spread[list[Row]], last: list[Row]) -> list[list[Row]]:
    """The groups that were kept, and the last one, which may still be incomplete."""
    kept = groups.items()
    if groups.stride > 1 and len(kept) > len(groups.kept):
        kept = groups.kept  # without the last group but one
    return [*kept, last] if last else kept


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def time_of(row: Row) -> float:
    return row["time"] if is_number(row.get("time")) else 0.0


def _yaml(text: str) -> Any:
    """Parse YAML that must be valid JSON: a list that contains itself, which YAML allows, raises ValueError."""
    return json.loads(json.dumps(yaml.safe_load(text), default=str))


def _object(parse: Any, path: Path) -> dict[str, Any]:
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
