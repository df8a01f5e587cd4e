"""report.html: a run as one page that needs no network or server, and renews itself while the run goes on.

The page is page/ (HTML, style, scripts) with the content of the output folder as one JSON text. The files
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
import shlex
import sys
import time
from typing import Any

from common.args import ARGUMENT_GROUPS, CommonArgs, defaults, first_definition
from common.errors import quoted, say
from common.files import replace_text
from common.run.folder import is_held, read_args, read_object
import numpy as np

PAGE = Path(__file__).parent / "page"
# The page's scripts, in this order.
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
PAUSE_FACTOR = 50  # no new page for 50 t seconds after one that took t to write: 2 % of the time at most
POINTS = 800  # of a curve
NUMBERS = 145_000  # in all curves of a page, about ten bytes each
# The most that is shown:
EVALUATIONS = 16  # of a run
ROLLOUTS = 24  # of a run
EVENTS = 64  # of each kind
PROMPTS = 400  # of an evaluation
GROUPS = 3  # of a rollout
ANSWERS = 16  # of a group
FAILED = 80  # of a suite
TEXT = 1500  # characters of a text
SETTING = 300  # characters of a setting
SAMPLES_SIZE = 200_000  # bytes
COMPLETIONS_SIZE = 150_000  # bytes
STARTS = ("started", "resumed")  # events
# The state of a run after an event.
STATES = {
    "started": "running",
    "resumed": "running",
    "stopped": "stopped",
    "died": "died",
    "finished": "finished",
}
# Without one of these, Accelerate would start something else. The run does not record which file it was.
CONFIGS = {"MULTI_CPU": "accelerate_configs/cpu_ddp.yaml", "FSDP": "CONFIG", "DEEPSPEED": "CONFIG"}
OF_THE_MACHINE = ("device", "processor", "processes", "mixed_precision", "distributed", "commit", "python")
OF_A_SAMPLE = ("step", "temperature", "prompt", "completion")  # all other numbers in its line are scores
# The axes, and metrics that follow from them.
NOT_DRAWN = ("step", "num_tokens", "epoch", "seconds", "cpu_seconds")
# The order of the plots:
FIRST = ("reward", "rewards/margins", "rewards/accuracies", "loss", "mean_token_accuracy")
MIDDLE = ("loss", "completions/mean_length", "entropy", "kl")
LAST = ("perplexity", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "memory_gib", "bad_steps")
MACHINE = LAST[1:]
SCORE = re.compile(r"rewards/(.+)/mean")
# Names of metrics in [0, 1], and of others.
OF_A_SHARE = re.compile("accurac|confidence|ratio|frac_|frequency|clipped|unused")
NOT_A_SHARE = re.compile("loss|perplexity|entropy|bits_per_byte|kl")

Row = dict[str, Any]


class Report:
    """The page of a running run, in its output folder: a part of a `Run`. If it cannot be written, a line says
    so, and the run continues."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.written = time.monotonic()  # when the last page was written
        self.took = 0.0  # the seconds that it took

    def on_log(self, step: int, values: Row) -> None:
        """Write the page after an evaluation, and now and then; never for more than a small share of the
        time."""
        pause = PAUSE_FACTOR * self.took
        if not any(name.startswith("eval_") for name in values):
            pause = max(pause, SECONDS)
        if time.monotonic() - self.written >= pause:
            self.write()

    def close(self) -> None:
        self.write()

    def write(self) -> None:
        start = time.monotonic()
        try:
            if is_held(self.folder):
                write_page(self.folder / "report.html", [describe_run(self.folder)])
        except Exception as error:  # the disk, or a folder that somebody changed: a page may not fail a run
            say(f"report.html was not written: {quoted(error, 200, str)}", sys.stderr)
        self.written = time.monotonic()
        self.took = self.written - start


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
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(finite, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def size_of(value: Any) -> int:
    """The bytes that a value takes in the page."""
    return len(embedded(value).encode("utf-8", "replace"))


def describe_run(folder: Path) -> Row:
    """Everything that a page shows of a run."""
    data = read_object(folder / "dataset.json")
    summary = read_object(folder / "summary.json")
    settings = read_args(folder)
    points = points_of(folder)
    events = list(lines(folder / "events.jsonl"))
    start = last_event(events, STARTS)
    script = str(start.get("script") or "")
    before, after = {}, {}
    for name, curve in points.items():
        if name.startswith("eval_"):
            before[name] = curve[0, 1]
            after[name] = curve[-1, 1]
    axes = {}
    for name in ("num_tokens", "seconds"):
        if name in points:
            axes[name] = spread(points[name].tolist(), POINTS // 2)
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
        "before": before,
        "after": after,
        "best": summary.get("best"),
        **curves_of(points),
        "axis": axes,
        "events": shown_events(events),
        "happened": len(events),
        "samples": samples_of(folder),
        "completions": completions_of(folder),
        "data": data or None,
        "memory": memory_of(points, start),
        "settings": settings_of(settings, start),
        "about": about(start, data),
        "command": command_of(script, folder, start) if script else None,
        "regression": regression_of(folder),
    }


# --- the files ----------------------------------------------------------------------------------------------


def lines(path: Path) -> Iterator[Row]:
    """The objects in a JSON-lines file that have a step. A damaged or unfinished line is skipped."""
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
    """At most `most` (an even number) of the items, evenly spread, and the last one. No more than these are
    held at any time."""
    kept = []
    stride = 1
    item = None
    for number, item in enumerate(items):
        if number % stride == 0 and len(kept) == most:
            kept = kept[::2]
            stride *= 2
        if number % stride == 0:
            kept.append(item)
    if kept and kept[-1] is not item:
        kept.append(item)
    return kept


# --- curves -------------------------------------------------------------------------------------------------


def points_of(folder: Path) -> dict[str, np.ndarray]:
    """The points (step, value) of each metric in metrics.jsonl, without values that are no finite numbers:
    {name: [n, 2]}."""
    pairs = {}
    for row in lines(folder / "metrics.jsonl"):
        for name, value in row.items():
            if is_number(value):
                pairs.setdefault(name, array("d")).extend((row["step"], value))
    return {name: np.frombuffer(numbers).reshape(-1, 2) for name, numbers in pairs.items()}


def last_of(points: dict[str, np.ndarray], name: str) -> float | None:
    return points[name][-1, 1] if name in points else None


def curves_of(points: dict[str, np.ndarray]) -> Row:
    """The curves, their plots in order, and which of these are constant."""
    curves = []
    frames = []
    constant = {}
    most = min(POINTS, NUMBERS // (4 * max(1, len(points))))
    for frame, names in frames_of(points).items():
        values = np.concatenate([points[name][:, 1] for name in names])
        least = float(values.min())
        greatest = float(values.max())
        if least == greatest and len(values) > len(names):
            constant[frame] = short(least)
        log = is_logarithmic(frame, least, greatest)
        share = is_share(frame, names, least, greatest)
        machine = frame in MACHINE
        frames.append({"name": frame, "log": log, "share": share, "machine": machine})
        for name in names:
            curve = thinned(points[name], most)
            is_eval = name.startswith("eval_")
            curves.append(curve | {"name": name, "frame": frame, "eval": is_eval, "machine": machine})
    return {"curves": curves, "frames": frames, "constant": constant}


def thinned(points: np.ndarray, most: int) -> Row:
    """{"x": steps, "y": values} in at most `most` groups of neighbours. If a group has several values, y is
    their mean, and "low" and "high" are their range: no peak is lost. points: [n, 2], n > 0."""
    x, y, low, high = [], [], [], []
    for group in np.array_split(points, min(most, len(points))):
        values = group[:, 1]
        x.append(round((group[0, 0] + group[-1, 0]) / 2))
        y.append(short(values.mean()))
        low.append(short(values.min()))
        high.append(short(values.max()))
    if len(points) > most:
        return {"x": x, "y": y, "low": low, "high": high}
    return {"x": x, "y": y}


def frame_of(name: str) -> str:
    """The plot that a metric belongs to: training and evaluation share one, as do all temperatures, a reward
    and its evaluation, and memory and its peak."""
    if name == "peak_memory_gib":
        return "memory_gib"
    if name.startswith("eval_"):
        name = re.sub(r"_t[\d.]+$", "", name.removeprefix("eval_"))
    score = SCORE.fullmatch(name)
    return score[1] if score else name


def frames_of(names: Iterable[str]) -> dict[str, list[str]]:
    """{plot: its metrics, training first}, in order of importance: rewards, margins and the loss first, then
    scores of completions, machine statistics last."""
    frames = {}
    for name in sorted(names, key=lambda name: name.startswith("eval_")):
        if name not in NOT_DRAWN:
            frames.setdefault(frame_of(name), []).append(name)
    first = list(FIRST)
    if "reward" in frames:
        first.remove("loss")  # with rewards it is centred on 0
    others = sorted(frames.keys() - set(LAST))
    rewards, scores = [], []
    for name in others:
        if is_reward(frames[name]):
            rewards.append(name)
        if frames[name][0].startswith("eval_") and not name.endswith("loss"):
            scores.append(name)
    order = dict.fromkeys([*first, *rewards, *scores, *MIDDLE, *others, *LAST])
    return {name: frames[name] for name in order if name in frames}


def is_reward(names: list[str]) -> bool:
    return any(map(SCORE.fullmatch, names))


def is_logarithmic(frame: str, least: float, greatest: float) -> bool:
    """Whether a plot reads better on a logarithmic scale: a loss that falls to a small fraction of its
    start."""
    return bool(re.search("loss|perplexity", frame)) and least > 0 and greatest > 8 * least


def is_share(frame: str, names: list[str], least: float, greatest: float) -> bool:
    """Whether a plot is of a share. Its axis ends at 0 and 1 and has a smallest span, so that one of 128
    completions does not look like a collapse."""
    if least < 0 or greatest > 1:
        return False
    if OF_A_SHARE.search(frame):
        return True
    is_score = is_reward(names) or names[0].startswith("eval_")
    return is_score and not NOT_A_SHARE.search(frame)


# --- events and texts ---------------------------------------------------------------------------------------


def last_event(events: list[Row], kinds: Iterable[str]) -> Row:
    """The last event of these kinds, {} without one."""
    for event in reversed(events):
        if str(event.get("kind")) in kinds:
            return event
    return {}


def state_of(events: list[Row], summary: Row) -> str:
    if summary:
        return "finished"
    last = last_event(events, STATES)
    return STATES[last["kind"]] if last else "unknown"


def shown_events(events: list[Row]) -> list[Row]:
    """The events, oldest first, with frequent kinds thinned out."""
    by_kind = {}
    for event in events:
        row = event | {"text": cut(event.get("text"), SETTING)}
        by_kind.setdefault(event["kind"], []).append(row)
    shown = []
    for rows in by_kind.values():
        shown += spread(rows, EVENTS)
    return sorted(shown, key=lambda event: event["time"])


def samples_of(folder: Path) -> Row | None:
    """{"steps", "names" (of scores), "prompts": [{"prompt", "temperature", "texts", "scores"}], "of": how
    many there are}.

    A text equal to that of the evaluation before is 0, an unknown one None. As many prompts as fit into the
    page. None: nothing was sampled.
    """
    counted = ((len(rows), rows[:PROMPTS]) for rows in groups(folder / "samples.jsonl"))
    evaluations = spread(counted, EVALUATIONS)
    if not evaluations:
        return None
    steps = []
    tables = []  # of each evaluation {prompt and temperature: the sample}
    for _, rows in evaluations:
        steps.append(rows[0]["step"])
        tables.append({asked(row): row for row in rows})
    prompts = []
    names = set()
    room = SAMPLES_SIZE
    for key in tables[-1]:
        prompt = answers_to([table.get(key, {}) for table in tables])
        room -= size_of(prompt)
        if room < 0 and prompts:
            break
        prompts.append(prompt)
        names.update(prompt["scores"])
    return {"steps": steps, "names": sorted(names), "prompts": prompts, "of": evaluations[-1][0]}


def answers_to(samples: list[Row]) -> Row:
    """A prompt of `samples_of`. samples: one of each evaluation; {} where the prompt was not completed."""
    last = samples[-1]
    texts = []
    scores = {name: [] for name in scores_of(last)}
    before = None
    for sample in samples:
        text = cut(sample["completion"]) if sample else None
        texts.append(0 if sample and text == before else text)
        before = text
        for name, column in scores.items():
            column.append(short(sample.get(name)))
    temperature = last.get("temperature")
    return {"prompt": prompt_text(last), "temperature": temperature, "texts": texts, "scores": scores}


def asked(row: Row) -> str:
    """What a completion answers: the prompt and the temperature."""
    return json.dumps([row.get("prompt"), row.get("temperature")], sort_keys=True)


def scores_of(row: Row) -> Row:
    scores = {}
    for name, value in row.items():
        if name not in OF_A_SAMPLE and (value is None or is_number(value)):
            scores[name] = value
    return scores


def prompt_text(row: Row) -> str:
    """A prompt as text, also if it is a list of chat messages."""
    prompt = row["prompt"]
    if not isinstance(prompt, list):
        return cut(prompt)
    if len(prompt) == 1:
        return cut(prompt[0]["content"])
    return cut("\n".join(f"{turn['role']}: {turn.get('content')}" for turn in prompt))


def completions_of(folder: Path) -> list[Row] | None:
    """From rollouts over the run: the first group of completions, those whose rewards differ most, and all
    rewards."""
    rollouts = [describe_rollout(rows) for rows in spread(groups(folder / "completions.jsonl"), ROLLOUTS)]
    while len(rollouts) > 1 and size_of(rollouts) > COMPLETIONS_SIZE:
        *others, last = rollouts
        rollouts = [*others[1::2], last]
    return rollouts or None


def describe_rollout(rows: list[Row]) -> Row:
    by_prompt = {}
    rewards = []
    for row in rows:
        by_prompt.setdefault(asked(row), []).append(row)
        if row.get("reward") is not None:  # distillation has none
            rewards.append(short(row["reward"]))
    first, *others = by_prompt.values()
    others.sort(key=variance, reverse=True)
    shown = []
    for group in [first, *others[: GROUPS - 1]]:
        shown.append({"prompt": prompt_text(group[0]), "rows": answers(group)})
    return {"step": rows[0]["step"], "count": len(rows), "groups": shown, "rewards": sorted(rewards)[:512]}


def variance(group: list[Row]) -> float:
    """Of the rewards of a prompt's completions."""
    return float(np.var([row.get("reward") or 0.0 for row in group]))


def answers(group: list[Row]) -> list[Row]:
    """The completions of a prompt, the best first, those without a reward last."""

    def rank(row: Row) -> float:
        return math.inf if row.get("reward") is None else -row["reward"]

    shown = []
    for row in sorted(group[:ANSWERS], key=rank):
        scores = row.get("rewards") or {}
        answer = {
            "reward": short(row.get("reward")),
            "advantage": short(row.get("advantage")),
            "rewards": {name: short(value) for name, value in scores.items()},
            "text": cut(row["completion"]),
            "cut": row.get("finished") is False,
        }
        shown.append(answer)
    return shown


def regression_of(folder: Path) -> list[Row] | None:
    """For each evaluation of a suite {"step", "groups"}; for the last one also the cases that turned or
    failed, as text."""
    row = {}
    evaluations = []
    for row in lines(folder / "regression.jsonl"):
        evaluations.append({"step": row["step"], "groups": row["groups"]})
    if not evaluations:
        return None
    turned = []
    for name, since in (("since_last", "since step"), ("since_base", "since the start, step")):
        change = (row.get("turned") or {}).get(name) or {}
        for word in ("fell", "rose"):
            if change.get(word):
                text = f"{word} {since} {change['step']}: {', '.join(change[word])}"
                turned.append(cut(text, SETTING))
    failed = []
    for name, case in (row.get("failed") or {}).items():
        failed.append(cut(f"{name}: {case['why']} · {case['completion']}", SETTING))
    evaluations[-1] |= {"turned": turned, "failed": failed[:FAILED]}
    return evaluations


def memory_of(points: dict[str, np.ndarray], start: Row) -> Row | None:
    """Memory in GiB: the peak that was used, and the total available. None: nothing was logged."""
    if "peak_memory_gib" not in points:
        return None
    peak = max(points["peak_memory_gib"][:, 1])
    return {"peak": short(peak), "limit": short(start.get("memory_limit_gib"))}


def settings_of(settings: Row, start: Row) -> list[Row]:
    """[{"group", "rows": [[name, value, whether it is the default]]}], in the order of --help."""
    shared = defaults(CommonArgs)
    changed = start.get("changed", settings)
    table = {"This script": []}
    for group in ARGUMENT_GROUPS:
        table[str(group.__doc__)] = []
    for name, value in settings.items():
        title = "This script"
        if name in shared:
            title = str(first_definition(CommonArgs, name)[0].__doc__)
        table[title].append([name, cut(as_typed(value), SETTING), name not in changed])
    return [{"group": title, "rows": rows} for title, rows in table.items() if rows]


def as_typed(value: Any) -> str:
    """A value as one would type it on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(as_typed, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {as_typed(part)}" for name, part in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    return "–" if value is None else str(value)


def about(start: Row, data: Row) -> list[list[str]]:
    """[label, text] pairs: the model, the machine, the versions."""
    model = dict(data.get("model") or {})
    counts = model.pop("parameters", {})
    facts = {"model": model.pop("class", None)}
    facts["parameters"] = " of ".join(f"{counts[name]:,}" for name in ("trained", "all") if name in counts)
    facts |= model
    for name in OF_THE_MACHINE:
        facts[name] = start.get(name)
    facts |= start.get("versions") or {}
    pairs = []
    for name, value in facts.items():
        if value and str(value).lower() != "no":
            pairs.append([name.replace("_", " "), cut(as_typed(value), SETTING)])
    return pairs


def command_of(script: str, folder: Path, start: Row) -> str:
    """The command that repeats the run, in a new folder."""
    processes = start.get("processes") or 1
    precision = start.get("mixed_precision") or "no"
    config = CONFIGS.get(start.get("distributed", ""))
    launcher = "python"
    if processes != 1 or precision != "no" or config:
        launcher = "accelerate launch -q"
    if config:
        launcher += f" --config_file {config}"
    if processes != 1:
        launcher += f" --num_processes {processes}"
    if precision != "no":
        launcher += f" --mixed_precision {precision}"
    path = Path(script).with_suffix("")
    if len(path.parts) > 1 and not path.is_absolute() and ".." not in path.parts:
        script = f"-m {'.'.join(path.parts)}"  # a module: it imports from the root
    else:
        script = shlex.quote(script)
    settings = shlex.quote(f"{folder}/args.yaml")
    again = shlex.quote(f"{folder}-again")
    return f"{launcher} {script} --config {settings} --output_dir {again}"
