"""report.html: a run as one page that needs no network or server, and renews itself while the run goes on.

The page is page/ (HTML, style, scripts) with what is found in the output folder as one JSON text. The files
are read anew for each page, line by line, and nothing in them is trusted or executed. A page stays below 2
MB.
"""

from array import array
from collections.abc import Iterable, Iterator
import contextlib
import html
import itertools
import json
import math
from pathlib import Path
import re
import sys
import time
from typing import Any

from common.args import CommonArgs, defaults, first_definition
from common.errors import quoted, say
from common.files import replace_text
from common.run.folder import is_held, read_args, read_json
import numpy as np

PAGE = Path(__file__).parent / "page"
# in this order
SCRIPTS = (
    "elements",
    "chart",
    "switches",
    "top",
    "curves",
    "samples",
    "completions",
    "facts",
    "compare",
    "page",
)
SECONDS = 20  # between two pages, if nothing was evaluated
SHARE = 50  # and always this many times the time that the last page took
POINTS, NUMBERS = 800, 145_000  # of a curve; in all curves of a page, about ten bytes each
EVALUATIONS, ROLLOUTS, EVENTS = 16, 24, 64  # of a run that are shown; events: of each kind
PROMPTS, GROUPS, ANSWERS, FAILED = 400, 3, 16, 80  # of an evaluation, of a rollout, of a group, of a suite
TEXT, SETTING = 1500, 300  # characters
SAMPLES_SIZE, COMPLETIONS_SIZE = 200_000, 150_000  # bytes
# by event
STATES = {"started": "running", "resumed": "running"} | {
    word: word for word in ("stopped", "died", "finished")
}
OF_THE_MACHINE = ("device", "processor", "processes", "mixed_precision", "distributed", "commit", "python")
OF_A_SAMPLE = ("step", "temperature", "prompt", "completion")  # all other numbers in its line are scores
NOT_DRAWN = ("step", "num_tokens", "epoch", "seconds", "cpu_seconds")  # axes, and what they determine
FIRST = ("reward", "rewards/margins", "rewards/accuracies", "loss", "mean_token_accuracy")
MIDDLE = ("loss", "completions/mean_length", "entropy", "kl")
LAST = ("perplexity", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "memory_gib", "bad_steps")
MACHINE = LAST[1:]
SCORE = re.compile(r"rewards/(.+)/mean")
OF_A_SHARE = re.compile(
    "accurac|confidence|ratio|frac_|frequency|clipped|unused"
)  # in [0, 1], by their names
NOT_A_SHARE = re.compile("loss|perplexity|entropy|bits_per_byte|kl")

Row = dict[str, Any]


class Report:
    """The page of a running run, in its output folder: a part of a `Run`. A page that cannot be written is a
    line, and does not stop the run."""

    def __init__(self, folder: str | Path):
        self.folder, self.written, self.took = Path(folder), time.monotonic(), 0.0

    def on_log(self, step: int, values: Row) -> None:
        """Write the page after an evaluation, and now and then; never for more than a small share of the
        time."""
        evaluated = any(name.startswith("eval_") for name in values)
        if time.monotonic() - self.written >= max(SHARE * self.took, 0 if evaluated else SECONDS):
            self.close()

    def close(self) -> None:
        """Write the page in any case."""
        begun = time.monotonic()
        try:
            if is_held(self.folder):
                write_page(self.folder / "report.html", [describe_run(self.folder)])
        except Exception as error:  # the disk, or a folder that somebody changed: a page may not fail a run
            say(f"report.html was not written: {quoted(error, 200, str)}", sys.stderr)
        self.written = time.monotonic()
        self.took = self.written - begun


def write_page(path: Path, runs: list[Row], compared: Row | None = None, more: tuple[Path, ...] = ()) -> None:
    """Write the page atomically. A lone surrogate, which is not a character, becomes a question mark. more:
    scripts for further sections, put before the last one, which draws the page."""
    replace_text(path, page(runs, compared, more).encode("utf-8", "replace").decode())


def page(runs: list[Row], compared: Row | None = None, more: tuple[Path, ...] = ()) -> str:
    """The page as text."""
    *first, last = [PAGE / f"{name}.js" for name in SCRIPTS]
    parts = {
        "title": html.escape(" · ".join(run["name"] for run in runs)),
        "style": (PAGE / "page.css").read_text(encoding="utf-8"),
        "scripts": "\n".join(script.read_text(encoding="utf-8") for script in (*first, *more, last)),
        "data": embedded({"runs": runs, "compared": compared}),
    }
    text = (PAGE / "page.html").read_text(encoding="utf-8")
    return re.sub(f"@@({'|'.join(parts)})@@", lambda found: parts[found[1]], text)


def embedded(value: Any) -> str:
    """JSON that is safe in a <script>: no "<" remains that could end the element or begin a comment. NaN and
    infinity become null."""
    known = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(known, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def describe_run(folder: Path) -> Row:
    """Everything that a page shows of a run."""
    data, summary, settings = (
        read_json(folder / "dataset.json"),
        read_json(folder / "summary.json"),
        read_args(folder),
    )
    points, events = points_of(folder), list(lines(folder / "events.jsonl"))
    begun = next((event for event in reversed(events) if event.get("kind") in ("started", "resumed")), {})
    script = str(begun.get("script") or "")
    evaluated = {name: found[:, 1] for name, found in points.items() if name.startswith("eval_")}
    return {
        "name": str(settings.get("run_name") or folder.resolve().name),
        "folder": str(folder),
        "script": Path(script).name,
        "state": state_of(events, summary),
        "written": round(time.time()),
        "step": last_of(points, "step") or 0,
        "steps": data.get("plan", {}).get("steps"),
        "seconds": last_of(points, "seconds"),
        "tokens": last_of(points, "num_tokens"),
        "before": {name: values[0] for name, values in evaluated.items()},
        "after": {name: values[-1] for name, values in evaluated.items()},
        "best": summary.get("best"),
        **curves_of(points),
        "axis": {
            name: spread(points[name].tolist(), POINTS // 2)
            for name in ("num_tokens", "seconds")
            if name in points
        },
        "events": shown_events(events),
        "happened": len(events),
        "samples": samples_of(folder),
        "completions": completions_of(folder),
        "data": data or None,
        "memory": memory_of(points, begun),
        "settings": settings_of(settings, begun),
        "about": about(begun, data),
        "command": command_of(script, folder, begun) if script else None,
        "regression": regression_of(folder),
    }


# --- the files ----------------------------------------------------------------------------------------------


def lines(path: Path) -> Iterator[Row]:
    """The objects in a JSON-lines file; a line that is damaged, or not yet whole, is passed over."""
    if path.is_file():
        with open(path, "rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    row = json.loads(line)
                    if isinstance(row, dict) and "step" in row:
                        yield row


def groups(path: Path) -> Iterator[list[Row]]:
    """The rows of each step in a JSON-lines file."""
    for _, rows in itertools.groupby(lines(path), key=lambda row: row["step"]):
        yield list(rows)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def cut(text: Any, limit: int = TEXT) -> str:
    text = "" if text is None else str(text)
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters)"


def short(value: Any) -> Any:
    """A number rounded to the five digits that a page shows."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def spread(items: Iterable[Any], most: int) -> list[Any]:
    """At most `most` (an even number) of the items, evenly spread, and the last one; never holds more of
    them."""
    kept: list[Any] = []
    stride, item = 1, None
    for number, item in enumerate(items):
        if number % stride == 0 and len(kept) == most:
            kept, stride = kept[::2], 2 * stride
        if number % stride == 0:
            kept.append(item)
    return kept if not kept or kept[-1] is item else [*kept, item]


# --- curves -------------------------------------------------------------------------------------------------


def points_of(folder: Path) -> dict[str, np.ndarray]:
    """The points (step, value) of each metric in metrics.jsonl, of the values that are finite numbers: {name:
    [n, 2]}."""
    pairs: dict[str, array[float]] = {}
    for row in lines(folder / "metrics.jsonl"):
        for name, value in row.items():
            if is_number(value):
                pairs.setdefault(name, array("d")).extend((row["step"], value))
    return {name: np.frombuffer(found).reshape(-1, 2) for name, found in pairs.items()}


def last_of(points: dict[str, np.ndarray], name: str) -> float | None:
    return points[name][-1, 1] if name in points else None


def curves_of(points: dict[str, np.ndarray]) -> Row:
    """The curves, their plots in order, and which of these are constant."""
    curves, frames, constant = [], [], {}
    most = min(POINTS, NUMBERS // (4 * max(1, len(points))))
    for frame, names in frames_of(points).items():
        values = np.concatenate([points[name][:, 1] for name in names])
        least, greatest = float(values.min()), float(values.max())
        if least == greatest and len(values) > len(names):
            constant[frame] = short(least)
        log, share = is_logarithmic(frame, least, greatest), is_share(frame, names, least, greatest)
        frames.append({"name": frame, "log": log, "share": share, "machine": frame in MACHINE})
        for name in names:
            curve = {
                "name": name,
                "frame": frame,
                "eval": name.startswith("eval_"),
                "machine": frame in MACHINE,
            }
            curves.append(curve | thinned(points[name], most))
    return {"curves": curves, "frames": frames, "constant": constant}


def thinned(points: np.ndarray, most: int) -> Row:
    """{"x": steps, "y": values} in at most `most` groups of neighbours. If a group has several values, y is
    their mean, and "low" and "high" are their range: no peak is lost. points: [n, 2], n > 0."""
    parts = np.array_split(points, min(most, len(points)))
    found = {"y": [part[:, 1].mean() for part in parts]}
    if len(points) > most:
        found |= {"low": [part[:, 1].min() for part in parts], "high": [part[:, 1].max() for part in parts]}
    rounded = {name: [short(value) for value in column] for name, column in found.items()}
    return rounded | {"x": [round((part[0, 0] + part[-1, 0]) / 2) for part in parts]}


def frame_of(name: str) -> str:
    """The plot that a metric belongs to: training and evaluation share one, as do all temperatures, a reward
    and its evaluation, and memory and its peak."""
    frame = re.sub(r"_t[\d.]+$", "", name.removeprefix("eval_")) if name.startswith("eval_") else name
    score = SCORE.fullmatch(frame)
    return score[1] if score else "memory_gib" if frame == "peak_memory_gib" else frame


def frames_of(names: Iterable[str]) -> dict[str, list[str]]:
    """{plot: its metrics, training first}, in order of importance: rewards, margins and the loss first, then
    scores of completions, machine statistics last."""
    frames: dict[str, list[str]] = {}
    drawn = [name for name in names if name not in NOT_DRAWN]
    for name in sorted(drawn, key=lambda name: name.startswith("eval_")):
        frames.setdefault(frame_of(name), []).append(name)
    # with rewards it is centred on 0
    first = [name for name in FIRST if name != "loss" or "reward" not in frames]
    others = sorted(frames.keys() - set(LAST))
    scores = [name for name in others if any(SCORE.fullmatch(metric) for metric in frames[name])]
    scores += [name for name in others if frames[name][0].startswith("eval_") and not name.endswith("loss")]
    order = dict.fromkeys([*first, *scores, *MIDDLE, *others, *LAST])
    return {name: frames[name] for name in order if name in frames}


def is_logarithmic(frame: str, least: float, greatest: float) -> bool:
    """Whether a plot reads better on a logarithmic scale: a loss that falls to a small fraction of its
    start."""
    return bool(re.search("loss|perplexity", frame)) and least > 0 and greatest > 8 * least


def is_share(frame: str, names: list[str], least: float, greatest: float) -> bool:
    """Whether a plot is of a share, whose axis ends at 0 and 1 and has a smallest span: one of 128
    completions is no collapse."""
    is_score = any(SCORE.fullmatch(name) for name in names) or names[0].startswith("eval_")
    is_named = OF_A_SHARE.search(frame) or (is_score and not NOT_A_SHARE.search(frame))
    return bool(is_named) and 0 <= least and greatest <= 1


# --- events and texts ---------------------------------------------------------------------------------------


def state_of(events: list[Row], summary: Row) -> str:
    last = next((event["kind"] for event in reversed(events) if str(event.get("kind")) in STATES), "")
    return "finished" if summary else STATES.get(last, "unknown")


def shown_events(events: list[Row]) -> list[Row]:
    """The events, oldest first, with frequent kinds thinned out."""
    shown = []
    for kind in dict.fromkeys(event["kind"] for event in events):
        shown += spread((event for event in events if event["kind"] == kind), EVENTS)
    return [
        event | {"text": cut(event.get("text"), SETTING)}
        for event in sorted(shown, key=lambda event: event["time"])
    ]


def samples_of(folder: Path) -> Row | None:
    """{"steps", "names" (of scores), "prompts": [{"prompt", "temperature", "texts", "scores"}], "of": how
    many there are}.

    A text equal to that of the evaluation before is 0, an unknown one None. As many prompts as fit into the
    page. None: nothing was sampled.
    """
    found = spread(((len(rows), rows[:PROMPTS]) for rows in groups(folder / "samples.jsonl")), EVALUATIONS)
    if not found:
        return None
    tables = [{asked(row): row for row in rows} for _, rows in found]
    prompts, left = [], SAMPLES_SIZE
    for key, last in tables[-1].items():
        rows = [table.get(key) for table in tables]
        texts = [cut(row["completion"]) if row else None for row in rows]
        told = [
            0 if text is not None and text == before else text
            for before, text in itertools.pairwise([None, *texts])
        ]
        scores = {name: [short(row.get(name)) if row else None for row in rows] for name in scores_of(last)}
        prompt = {
            "prompt": prompt_text(last),
            "temperature": last.get("temperature"),
            "texts": told,
            "scores": scores,
        }
        left -= len(embedded(prompt).encode("utf-8", "replace"))
        if left < 0 and prompts:
            break
        prompts.append(prompt)
    names = sorted({name for prompt in prompts for name in prompt["scores"]})
    return {
        "steps": [rows[0]["step"] for _, rows in found],
        "names": names,
        "prompts": prompts,
        "of": found[-1][0],
    }


def asked(row: Row) -> str:
    """What a completion answers: the prompt and the temperature."""
    return json.dumps([row.get("prompt"), row.get("temperature")], sort_keys=True)


def scores_of(row: Row) -> Row:
    return {
        name: value
        for name, value in row.items()
        if name not in OF_A_SAMPLE and (value is None or is_number(value))
    }


def prompt_text(row: Row) -> str:
    """A prompt as text, also if it is a list of chat messages."""
    prompt = row["prompt"]
    if isinstance(prompt, list) and len(prompt) > 1:
        prompt = "\n".join(f"{turn['role']}: {turn.get('content')}" for turn in prompt)
    return cut(prompt[0]["content"] if isinstance(prompt, list) else prompt)


def completions_of(folder: Path) -> list[Row] | None:
    """From rollouts over the run: the first group of completions, those whose rewards differ most, and all
    rewards."""
    described = [rollout(rows) for rows in spread(groups(folder / "completions.jsonl"), ROLLOUTS)]
    while len(described) > 1 and len(embedded(described).encode("utf-8", "replace")) > COMPLETIONS_SIZE:
        described = [*described[:-1][1::2], described[-1]]
    return described or None


def rollout(rows: list[Row]) -> Row:
    prompts: dict[str, list[Row]] = {}
    for row in rows:
        prompts.setdefault(asked(row), []).append(row)
    first, *others = prompts.values()
    apart = sorted(others, key=lambda group: -np.var([row.get("reward") or 0.0 for row in group]))
    shown = [
        {"prompt": prompt_text(group[0]), "rows": answers(group)} for group in [first, *apart[: GROUPS - 1]]
    ]
    # distillation has none
    rewards = sorted(short(row["reward"]) for row in rows if row.get("reward") is not None)[:512]
    return {"step": rows[0]["step"], "count": len(rows), "groups": shown, "rewards": rewards}


def answers(group: list[Row]) -> list[Row]:
    """The completions of a prompt, the best first."""
    found = []
    for row in sorted(
        group[:ANSWERS], key=lambda row: math.inf if row.get("reward") is None else -row["reward"]
    ):
        shown = {name: short(row.get(name)) for name in ("reward", "advantage")}
        shown["rewards"] = {name: short(value) for name, value in (row.get("rewards") or {}).items()}
        found.append(shown | {"text": cut(row["completion"]), "cut": row.get("finished") is False})
    return found


def regression_of(folder: Path) -> list[Row] | None:
    """For each evaluation of a suite {"step", "groups"}; for the last one also the cases that turned or
    failed, as text."""
    last: Row = {}
    found = []
    for last in lines(folder / "regression.jsonl"):
        found.append({"step": last["step"], "groups": last["groups"]})
    turned = []
    for name, since in (("since_last", "since step"), ("since_base", "since the start, step")):
        then = (last.get("turned") or {}).get(name) or {}
        turned += [
            f"{word} {since} {then['step']}: {', '.join(then[word])}"
            for word in ("fell", "rose")
            if then.get(word)
        ]
    failed = [
        f"{name}: {why['why']} · {why['completion']}" for name, why in (last.get("failed") or {}).items()
    ]
    told = {
        "turned": [cut(line, SETTING) for line in turned],
        "failed": [cut(line, SETTING) for line in failed[:FAILED]],
    }
    return [*found[:-1], found[-1] | told] if found else None


def memory_of(points: dict[str, np.ndarray], begun: Row) -> Row | None:
    """Memory in GiB: the peak that was used, and the total available. None: nothing was logged."""
    if "peak_memory_gib" not in points:
        return None
    return {
        "peak": short(max(points["peak_memory_gib"][:, 1])),
        "limit": short(begun.get("memory_limit_gib")),
    }


def settings_of(settings: Row, begun: Row) -> list[Row]:
    """[{"group", "rows": [[name, value, whether it is the default]]}], in the order of --help."""
    shared, changed = defaults(CommonArgs), begun.get("changed", settings)
    table: dict[str, list[Any]] = {"This script": []} | {
        str(cls.__doc__): [] for cls in CommonArgs.__mro__[-2:0:-1]
    }
    for name, value in settings.items():
        group = str(first_definition(CommonArgs, name)[0].__doc__) if name in shared else "This script"
        table[group].append([name, cut(as_typed(value), SETTING), name not in changed])
    return [{"group": group, "rows": rows} for group, rows in table.items() if rows]


def as_typed(value: Any) -> str:
    """A value as one would type it on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(as_typed, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {as_typed(part)}" for name, part in value.items())
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def about(begun: Row, data: Row) -> list[list[str]]:
    """[label, text] pairs: the model, the machine, the versions."""
    model = dict(data.get("model") or {})
    counts = model.pop("parameters", {})
    found = {"model": model.pop("class", None)}
    found["parameters"] = " of ".join(f"{counts[name]:,}" for name in ("trained", "all") if name in counts)
    found |= model | {name: begun.get(name) for name in OF_THE_MACHINE} | (begun.get("versions") or {})
    return [
        [name.replace("_", " "), cut(as_typed(value), SETTING)]
        for name, value in found.items()
        if value and str(value).lower() != "no"
    ]


def command_of(script: str, folder: Path, begun: Row) -> str:
    """The command that repeats the run, in a new folder."""
    launch = {
        "num_processes": begun.get("processes") or 1,
        "mixed_precision": begun.get("mixed_precision") or "no",
    }
    words = [f"--{name} {value}" for name, value in launch.items() if value not in (1, "no")]
    path = Path(script).with_suffix("")
    # it imports from the root
    is_module = len(path.parts) > 1 and not path.is_absolute() and ".." not in path.parts
    name = f"-m {'.'.join(path.parts)}" if is_module else script
    start = ["accelerate launch -q", *words] if words else ["python"]
    return " ".join([*start, name, f"--config {folder}/args.yaml --output_dir {folder}-again"])
