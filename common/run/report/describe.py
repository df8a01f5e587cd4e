"""The contents of a page as JSON: everything in a run's output folder, in bounded space."""

import ast
import dataclasses
import math
import re
import time
from pathlib import Path
from typing import Any

from common.args import CommonArgs, first_definition
from common.run.curves import MACHINE, frame_of, frames_of, is_logarithmic
from common.run.report.read import POINTS, Folder, Row, cut, is_number, time_of
from common.run.report.thin import short, weight

SAMPLES_SIZE, COMPLETIONS_SIZE = 200_000, 150_000  # bytes within a page
NUMBERS = 110_000  # numbers in all curves of a page, about ten bytes each
GROUPS = 3  # of a rollout: the first one, and those whose rewards differ most
SETTING = 300  # characters
SECRET = re.compile(r"webhook|secret|password|passwd|api_key|hub_token|hf_token", re.I)


def describe_run(folder: Folder, summary: dict[str, Any] | None = None) -> dict[str, Any]:
    """Everything that a page shows of a run. summary: that of a run that is ending, before it is written."""
    folder.update()
    summary = folder.read("summary.json") if summary is None else summary
    data, settings, inputs = folder.read("dataset.json"), folder.settings, folder.read("inputs.json")
    events = events_of(folder, summary)
    begun = next((event for event in reversed(events) if event["kind"] in ("started", "resumed")), {})
    script = str(begun.get("script") or inputs.get("script") or "")
    samples = folder.samples()
    if not folder.table:
        folder.table = settings_of(settings, folder.path / Path(script).name)
    return {
        "name": str(settings.get("run_name") or folder.path.resolve().name),
        "folder": str(folder.path),
        "script": Path(script).name,
        "state": state_of(events, summary),
        "written": round(time.time()),
        "step": folder.last.get("step", 0),
        "steps": _get(data, "plan", "steps"),
        "seconds": folder.last.get("seconds"),
        "tokens": folder.last.get("num_tokens"),
        "before": folder.first_eval,
        "after": folder.last_eval,
        "best": summary.get("best") if isinstance(summary.get("best"), dict) else None,
        **curves_of(folder),
        "events": events,
        "happened": sum(kind.count for kind in folder.events.values()),
        "samples": samples_of(samples),
        "rates": rates_of(samples[-1]) if samples else {},
        "completions": completions_of(folder.completions()),
        "data": data_of(data),
        "memory": memory_of(folder, data, summary, begun),
        "settings": folder.table,
        "about": about(begun, summary, data),
        "command": command_of(script, folder.path, begun, summary),
        "regression": regression_of(folder.regression),
    }


# --- curves ---------------------------------------------------------------------------------------------------------


def curves_of(folder: Folder) -> dict[str, Any]:
    """The curves, their common steps, their plots in order, the metrics that stayed constant, and the tokens and seconds at
    some steps."""
    steps: list[list[int]] = []
    curves, frames, constant = [], [], {}
    most = POINTS
    while most > 50 and sum(curve.numbers(most) for curve in folder.curves.values()) > NUMBERS:
        most //= 2
    for frame, names in frames_of(folder.curves).items():
        known = {name: folder.curves[name] for name in names if folder.curves[name].buckets}
        if not known:
            continue
        least, greatest = (ends(end for curve in known.values() for end in curve.range()) for ends in (min, max))
        if least == greatest and any(len(curve.buckets) > 1 for curve in known.values()):
            constant[frame] = short(least)
            continue
        frames.append({"name": frame, "log": is_logarithmic(frame, least, greatest), "machine": frame in MACHINE})
        for name, curve in known.items():
            table = curve.table(most)
            x = table.pop("x")
            if x not in steps:
                steps.append(x)
            curves.append({"name": name, "frame": frame_of(name), "eval": name.startswith("eval_"), "x": steps.index(x)})
            curves[-1] |= table | ({"machine": True} if frame in MACHINE else {})
    axis = [row for row in folder.axis.items() if row]
    return {
        "x": steps,
        "curves": curves,
        "frames": frames,
        "constant": constant,
        "axis": {
            "step": [row[0] for row in axis],
            "tokens": [row[1] for row in axis],
            "seconds": [row[2] if row[2] is None else round(row[2], 2) for row in axis],
        },
    }


# --- what happened --------------------------------------------------------------------------------------------------


def events_of(folder: Folder, summary: dict[str, Any]) -> list[Row]:
    """Events, oldest first. For runs without events.jsonl (of an older version), what the summary tells."""
    known = ("step", "time", "kind", "text")
    found = [row | {"text": cut(row.get("text"), 300), "time": time_of(row)} for row in folder.happened()]
    if not found:
        bad = [(step, "bad", "the step was not taken") for step in summary.get("bad_steps") or []]
        bad += [(step, "spike", "the loss jumped") for step in summary.get("loss_spikes") or []]
        found = [dict(zip(known, (step, None, kind, text), strict=True)) for step, kind, text in sorted(bad)]
    return found


def state_of(events: list[Row], summary: dict[str, Any]) -> str:
    last = next((e["kind"] for e in reversed(events) if e["kind"] in ("started", "resumed", "stopped", "finished")), None)
    if summary or last == "finished":
        return "finished"
    return {None: "unknown", "stopped": "stopped"}.get(last, "running")


# --- texts ----------------------------------------------------------------------------------------------------------


def samples_of(evaluations: list[list[Row]]) -> dict[str, Any] | None:
    """{"steps", "names" (of scores), "prompts": [{"prompt", "temperature", "texts", "scores"}], "of": how many there are}.

    A text equal to the previous step's is 0, an unknown one None. As many prompts as fit into the page.
    """
    evaluations = [rows for rows in evaluations if rows]
    if not evaluations:
        return None
    tables = [{row["key"]: row for row in rows if "text" in row} for rows in evaluations]
    prompts, left = [], SAMPLES_SIZE
    for key, row in tables[-1].items():
        texts: list[str | int | None] = []
        before = None
        for table in tables:
            text = table[key]["text"] if key in table else None
            texts.append(0 if text is not None and text == before else text)
            before = text if text is not None else before
        left -= weight(row["prompt"]) + sum(weight(text) if isinstance(text, str) else 2 for text in texts)
        if left < 0 and prompts:
            break
        scores = {name: [_short(t.get(key, {}).get("scores", {}).get(name)) for t in tables] for name in row["scores"]}
        prompts.append({"prompt": row["prompt"], "temperature": row["temperature"], "texts": texts, "scores": scores})
    names = sorted({name for prompt in prompts for name in prompt["scores"]})
    return {
        "steps": [rows[0]["step"] for rows in evaluations],
        "names": names,
        "prompts": prompts,
        "of": len(evaluations[-1]),
    }


def rates_of(rows: list[Row]) -> dict[str, Any]:
    """{score: {"passed", "of"}} of the last evaluation, for scores that are 0 or 1, at the first temperature."""
    first = rows[0].get("temperature")
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.get("temperature") == first:
            for name, value in row["scores"].items():
                if value is not None:
                    found.setdefault(name, []).append(value)
    counts = {name: values for name, values in found.items() if set(values) <= {0, 1}}
    return {name: {"passed": int(sum(values)), "of": len(values)} for name, values in counts.items()}


def completions_of(rollouts: list[list[Row]]) -> list[dict[str, Any]] | None:
    """From rollouts over the run: the first group of completions, those whose rewards differ most, and all rewards."""
    described = [_rollout(rows) for rows in rollouts if rows]
    while sum(map(_size, described)) > COMPLETIONS_SIZE and len(described) > 2:
        described = [*described[:-1][::2], described[-1]]  # every other one, always with the last
    if (size := sum(map(_size, described))) > COMPLETIONS_SIZE:
        for text in (row for rollout in described for group in rollout["groups"] for row in (group, *group["rows"])):
            name = "text" if "text" in text else "prompt"
            text[name] = cut(text[name], int(len(text[name]) * COMPLETIONS_SIZE / size))
    return described or None


def _rollout(rows: list[Row]) -> dict[str, Any]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["prompt"], []).append(row)
    several = list(groups.values())
    apart = sorted(several[1:], key=lambda group: -_spread([row["reward"] or 0.0 for row in group]))
    kept = ("text", "reward", "advantage", "rewards", "cut")
    return {
        "step": rows[0]["step"],
        "count": len(rows),
        "groups": [
            {
                "prompt": group[0]["prompt"],
                "rows": [{name: _short(row[name]) for name in kept} for row in sorted(group[:16], key=_reward)],
            }
            for group in [several[0], *apart[: GROUPS - 1]]
        ],
        "rewards": [_short(value) for value in sorted(row["reward"] for row in rows if row["reward"] is not None)][:512],
    }


def _spread(values: list[float]) -> float:
    """The variance; statistics.variance computes with fractions and is slow."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)


def _reward(row: Row) -> float:
    return -math.inf if row["reward"] is None else -row["reward"]


def _size(rollout: dict[str, Any]) -> int:
    texts = [text for group in rollout["groups"] for text in (group["prompt"], *(row["text"] for row in group["rows"]))]
    return sum(weight(text) + 80 for text in texts)


def regression_of(rows: list[Row]) -> list[Row] | None:
    """For each evaluation of a suite {"step", "groups": {name: {"passed", "total"}}}; for the last one also the cases that
    turned or failed, as lines of text. A line needs only its groups, with positive counts."""
    found = []
    for row in rows:
        groups = row.get("groups") if isinstance(row.get("groups"), dict) else {}
        counts = {
            str(name): {"passed": group.get("passed"), "total": group.get("total")}
            for name, group in groups.items()
            if isinstance(group, dict) and is_number(group.get("passed")) and is_number(group.get("total"))
            if 0 <= group["passed"] <= group["total"] <= 1e12
        }
        if counts:
            found.append({"step": row["step"], "groups": counts})
    if not found:
        return None
    turned, failed = (_get(rows[-1], name) for name in ("turned", "failed"))
    if isinstance(turned, dict):  # {"since_last": {"step", "fell": [id], "rose": [id]}, "since_base": the same}
        turned = {
            f"{word} since {'step ' if name == 'since_last' else 'the start, step '}{_get(then, 'step')}": ids
            for name, then in turned.items()
            for word in ("fell", "rose")
            if (ids := _get(then, word))
        }
    return [*found[:-1], found[-1] | {"turned": _texts(turned), "failed": _texts(failed)}]


def _texts(value: Any, most: int = 80) -> list[str]:
    """Lines of text from data of unknown structure, one per entry."""
    if isinstance(value, dict):
        lines = [f"{name}: {_line(part)}" for name, part in value.items()]
    else:
        lines = [_line(part) for part in value] if isinstance(value, list) else [_line(value)] if value else []
    return [cut(line, 400) for line in lines[:most]]


def _line(value: Any) -> str:
    if isinstance(value, dict):
        return " · ".join(_line(part) for part in value.values())
    return ", ".join(map(_line, value)) if isinstance(value, list) else str(value)


# --- data, memory, settings -----------------------------------------------------------------------------------------


def data_of(facts: dict[str, Any]) -> dict[str, Any] | None:
    """dataset.json without the parts that the page shows elsewhere."""
    names = ("sources", "eval_sources", "lengths", "packing", "example", "batched_as", "plan", "marked")
    return {name: facts.get(name) for name in names} if facts else None


def memory_of(folder: Folder, facts: dict[str, Any], summary: dict[str, Any], begun: Row) -> dict[str, Any] | None:
    """Memory in GiB: the estimate by part, the peak that was used, and the total available."""
    peak = (
        folder.curves["peak_memory_gib"].range()[1] if "peak_memory_gib" in folder.curves else summary.get("peak_memory_gib")
    )
    parts = facts.get("memory_gib") if isinstance(facts.get("memory_gib"), dict) else {}
    if peak is None and not parts:
        return None
    limit = begun.get("memory_limit_gib") or summary.get("memory_limit_gib")
    return {"parts": {name: _short(v) for name, v in parts.items()}, "peak": _short(peak), "limit": _short(limit)}


def settings_of(settings: dict[str, Any], script: Path) -> list[dict[str, Any]]:
    """[{"group", "rows": [[name, value, whether it is the default]]}], in the order of --help."""
    defaults = defaults_of(script)
    groups: dict[str, list[list[Any]]] = {"This script": []}
    groups |= {str(cls.__doc__): [] for cls in reversed(CommonArgs.__mro__[1:-1])}
    shared = {field.name for field in dataclasses.fields(CommonArgs)}
    for name, value in settings.items():
        if SECRET.search(str(name)):
            continue
        group = str(first_definition(CommonArgs, name)[0].__doc__) if name in shared else "This script"
        unchanged = name in defaults and defaults[name] == value
        groups[group].append([str(name), cut(_shown(value), SETTING), unchanged])
    return [{"group": group, "rows": rows} for group, rows in groups.items() if rows]


def defaults_of(script: Path) -> dict[str, Any]:
    """The defaults of the shared arguments, and of the script's own, read from its copy without executing it."""
    found = {}
    for field in dataclasses.fields(CommonArgs):
        found[field.name] = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            given = [keyword.value for keyword in node.value.keywords if keyword.arg == "default"]
            try:
                found[node.target.id] = ast.literal_eval((node.value.args or given or [ast.Constant(None)])[0])
            except (ValueError, TypeError, RecursionError):
                continue
    return found


def about(begun: Row, summary: dict[str, Any], facts: dict[str, Any]) -> list[list[str]]:
    """[label, text] pairs: the machine, the versions, the model."""
    model = facts.get("model") if isinstance(facts.get("model"), dict) else {}
    versions = begun.get("versions") or summary.get("versions")
    counts = facts.get("parameters") if isinstance(facts.get("parameters"), dict) else {}
    found = {
        "model": model.get("class"),
        "parameters": " of ".join(f"{counts[k]:,}" for k in ("trained", "all") if isinstance(counts.get(k), int)),
        "dtype": _shown(model.get("dtype")),
        "quantised layers": model.get("quantised") or None,
        "adapted layers": _shown(model.get("adapted_layers") or None),
        "stop tokens": _shown(model.get("stop_tokens")),
        "device": begun.get("device") or summary.get("device"),
        "processes": begun.get("processes") or summary.get("processes"),
        "mixed precision": begun.get("mixed_precision"),
        "distributed": begun.get("distributed"),
        "host": begun.get("host"),
        "python": begun.get("python") or summary.get("python"),
        **(versions if isinstance(versions, dict) else {}),
    }
    return [[name, cut(value, SETTING)] for name, value in found.items() if value not in (None, "", "–")]


def command_of(script: str, folder: Path, begun: Row, summary: dict[str, Any]) -> str:
    """The command that repeats the run, in a new folder."""
    if not script:
        return ""
    processes, precision = begun.get("processes") or summary.get("processes") or 1, begun.get("mixed_precision") or "no"
    words = ["accelerate launch"]
    words += [f"--num_processes {processes}"] if processes != 1 else []
    words += [f"--mixed_precision {precision}"] if precision != "no" else []
    path = Path(script).with_suffix("")
    inside = len(path.parts) > 1 and not path.is_absolute() and ".." not in path.parts  # it imports from the root
    words.append(f"-m {'.'.join(path.parts)}" if inside else script)
    return " ".join([*words, f"--config {folder}/args.yaml --output_dir {folder}-again"])


def _shown(value: Any) -> str:
    """A value as one would type it on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items())
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    return short(value) if isinstance(value, float) and math.isfinite(value) else value


def _get(facts: Any, *names: str) -> Any:
    for name in names:
        facts = facts.get(name) if isinstance(facts, dict) else None
    return facts
