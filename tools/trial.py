"""Is my edit better? Runs a script and edited copies over several seeds, and tells an improvement from noise.

python -m tools.trial train_sft.py train_mine.py --seeds 0 1 2 -- --config data/configs/sft.yaml
python -m tools.trial train_sft.py "train_sft.py --learning_rate 2e-3"    # a side may have words of its own
python -m tools.trial train_sft.py train_a.py train_b.py --minutes 5      # equal budgets of training time
python -m tools.trial train_sft.py --again                                # with itself: the noise floor

The first side is what the others are compared with; what follows -- is for all of them. A run is in
OUTPUT_DIR/<side>/seed<N>: a complete one is taken as it is, a cut one goes on. Writes trial.html and
trial.json there. Exit code: 0 if a side is better, 3 if none is and not all are worse, 4 if all are worse, 1
after an error. docs/trials.md says how it decides.
"""

import argparse
from collections.abc import Callable
import contextlib
from dataclasses import dataclass, field
import functools
import hashlib
import json
import math
import os
from pathlib import Path
import re
import shlex
import signal
import subprocess
import sys
import time

from common.errors import UserError, say
from common.files import code_hash, file_hash, replace_text
from common.run.folder import read_object
from common.run.parts.report import points_of

from tools import as_command
from tools.trial_page import console, write_trial
from tools.trial_verdict import (
    UNKNOWN,
    Row,
    TrialRun,
    choose_metric,
    noise_floor,
    read_outcome,
    refuse_other_evaluation,
    refuse_other_seed,
    verdicts,
)

SET_HERE = ("--seed", "--output_dir", "--overwrite_output_dir", "--dry_run")
BUDGETS = {"tokens": "num_tokens", "cpu_seconds": "cpu_seconds", "minutes": "seconds"}  # option: metric
PROBE = "--max_steps 24 --eval_steps 0 --save_steps 0 --logging_steps 1".split()
WARM = 4  # steps of a probe that do not count
CODES = {"better": 0, UNKNOWN: 3, "worse": 4, "failed": 1}
POLL = 0.2  # seconds


@dataclass
class Side:
    """A script with words of its own, and what became of its runs."""

    name: str
    words: list[str]  # what follows `python`
    seeds: list[int]
    folder: Path
    failed: str = ""  # which run failed, and its last line
    outcomes: list[TrialRun] = field(default_factory=list)  # one for each seed


@dataclass
class Job:
    """A run of a side."""

    side: Side
    name: str  # of its folder
    words: list[str]

    @property
    def folder(self) -> Path:
        return self.side.folder / self.name

    @property
    def note(self) -> Path:
        return self.side.folder / f"{self.name}.json"  # what the run was made of

    @property
    def log(self) -> Path:
        return self.side.folder / f"{self.name}.log"


def main(words: list[str] | None = None) -> int:
    """Returns the exit code."""
    words = sys.argv[1:] if words is None else words
    at = words.index("--") if "--" in words else len(words)
    args = parse(words[:at])
    sides = sides_of(args, words[at + 1 :])
    for option, metric in BUDGETS.items():
        if getattr(args, option):
            set_steps(sides, metric, getattr(args, option) * (60 if option == "minutes" else 1), args)
    run_sides(sides, args)

    parent, *others = sides
    if parent.failed:
        raise UserError(f"{parent.name} failed: {parent.failed}")
    metric, sign = choose_metric(args.metric, parent.outcomes[0])
    compared = [side for side in others if not side.failed]
    runs = {side.name: side.outcomes for side in compared}
    table = verdicts(parent.outcomes, runs, metric, sign, args.alpha)
    known = []
    for side in others:
        rows = table.get(side.name, [])
        if not rows and not side.failed:
            side.failed = f"not every run has a finite {metric}, over the same held-out rows and rewards"
        verdict = rows[0]["word"] if rows else "failed"
        about = {"name": side.name, "command": shlex.join(side.words), "verdict": verdict}
        known.append(about | {"failed": side.failed, "metrics": rows})
    trial: Row = {"metric": metric, "higher_is_better": sign > 0, "alpha": args.alpha, "seeds": args.seeds}
    trial["parent"] = {"name": parent.name, "command": shlex.join(parent.words)}
    trial["sides"] = known
    if args.again:
        trial["noise"] = noise_floor([*parent.outcomes, *others[0].outcomes], len(args.seeds))
    say("\n".join(console(trial)))
    folder = Path(args.output_dir)
    replace_text(folder / "trial.json", json.dumps(trial, indent=1) + "\n")
    if compared:
        write_trial(folder / "trial.html", trial, {parent.name: parent.outcomes, **runs})
        say(f"{folder / 'trial.html'}: open it in a browser")
    words_found = [side["verdict"] for side in known]
    return next(code for word, code in CODES.items() if word in words_found)


# --- the sides ----------------------------------------------------------------------------------------------


def parse(words: list[str]) -> argparse.Namespace:
    how = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser("python -m tools.trial", **how)
    parser.add_argument(
        "sides", nargs="+", help='the script, then edited copies; "train_x.py --flag 1" with words of its own'
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="(0 1 2)")
    parser.add_argument(
        "--again", action="store_true", help="compare the only side with itself over as many other seeds"
    )
    parser.add_argument(
        "--metric",
        help="that the verdict is about, min:NAME or max:NAME; unset: the first score, or the loss",
    )
    parser.add_argument(
        "--alpha", type=float, default=0.05, help="risk of telling apart what is equal (0.05)"
    )
    budgets = parser.add_mutually_exclusive_group()
    budgets.add_argument("--tokens", type=float, help="of training for each run, by its --max_steps")
    budgets.add_argument("--cpu_seconds", type=float, help="the same in seconds of cores")
    budgets.add_argument("--minutes", type=float, help="the same in minutes, without start and evaluations")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (1)")
    parser.add_argument("--other_data", action="store_true", help="sides may train on other data")
    parser.add_argument("--launcher", default="", help='"accelerate launch ..." in place of python')
    parser.add_argument("--output_dir", default="outputs/trial", help="(outputs/trial)")
    args, rest = parser.parse_known_args(words)
    if rest:
        raise UserError(f"unknown: {' '.join(rest)}; words for the scripts stand after -- at the end")
    for option in ("tokens", "cpu_seconds", "minutes"):
        value = getattr(args, option)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{option} {value:g}: expected a number above 0")
    if not 0 < args.alpha < 1 or args.jobs < 1 or min(args.seeds) < 0:
        raise UserError("--alpha is between 0 and 1, --jobs at least 1, --seeds from 0")
    if len(set(args.seeds)) < len(args.seeds):
        raise UserError(f"--seeds {' '.join(map(str, args.seeds))}: each one once")
    if args.again != (len(args.sides) == 1):
        raise UserError("name two scripts or more, or one with --again")
    return args


def sides_of(args: argparse.Namespace, shared: list[str]) -> list[Side]:
    sides = []
    for text in args.sides:
        try:
            script, *own = [text] if os.path.isfile(text) else shlex.split(text)
        except ValueError as error:
            raise UserError(f"side `{text}`: {error}; expected a script, and words of its own") from None
        if not script.endswith(".py") or not Path(script).is_file():
            problem = "expected a script, like train_sft.py" if Path(script).exists() else "no such file"
            raise UserError(f"{script}: {problem}")
        for word in [*shared, *own]:
            if word.split("=")[0] in SET_HERE:
                raise UserError(f"{word}: the trial sets that itself (its own --output_dir stands before --)")
        path = Path(os.path.relpath(script))
        name = " ".join([str(path.with_name(path.stem.removeprefix("train_"))), *own])
        folder = Path(args.output_dir, folder_name(name))
        # a side's own words come last, and so they count
        sides.append(Side(name, [script, *shared, *own], args.seeds, folder))
    if len({side.folder for side in sides}) < len(sides):
        raise UserError("two sides are the same: --again compares a script with itself")
    if args.again:
        [side] = sides
        later = max(args.seeds) + 1
        seeds = list(range(later, later + len(args.seeds)))
        sides.append(Side(f"{side.name} again", side.words, seeds, side.folder))
    return sides


def folder_name(name: str) -> str:
    """The name of a side as that of a folder, of at most 255 bytes. A long one ends in its hash."""
    plain = re.sub(r"[^\w.=-]+", "_", name)
    return plain if len(plain) <= 60 else f"{plain[:50]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def set_steps(sides: list[Side], metric: str, budget: float, args: argparse.Namespace) -> None:
    """Give each side the --max_steps that use the budget, by what the steps of a short run use."""
    probes = {side.folder: Job(side, "probe", [*side.words, *PROBE]) for side in sides}
    run_jobs(list(probes.values()), args)
    for side in sides:
        job = probes[side.folder]
        if job.side.failed:
            side.failed = job.side.failed
            continue
        (first_step, first), (last_step, last) = points_of(job.folder)[metric][[WARM, -1]]
        steps = max(1, int(budget * (last_step - first_step) / max(last - first, 1e-9)))
        side.words = [*side.words, "--max_steps", str(steps)]
        say(f"{side.name}: {steps} steps")


# --- the runs -----------------------------------------------------------------------------------------------


def run_sides(sides: list[Side], args: argparse.Namespace) -> None:
    """Run all sides seed by seed, so that what changes on the machine meanwhile meets all of them."""
    jobs = []
    for k in range(len(args.seeds)):
        for side in sides:
            words = [*side.words, "--seed", str(side.seeds[k])]
            jobs.append(Job(side, f"seed{side.seeds[k]}", words))
    done: list[TrialRun] = []

    def check(job: Job) -> None:
        """Read a complete run, and end the trial if it cannot be compared with the others."""
        outcome = read_outcome(job.folder)
        side = job.side
        if side.outcomes:
            refuse_other_seed(side.outcomes[0], outcome)
        if done:
            refuse_other_evaluation(done[0], outcome, args.other_data or bool(side.outcomes))
        if side is sides[0]:
            choose_metric(args.metric, outcome)
        side.outcomes.append(outcome)
        done.append(outcome)

    run_jobs(jobs, args, check)
    for side in sides:  # with --jobs they end in any order
        order = [side.folder / f"seed{seed}" for seed in side.seeds]
        side.outcomes.sort(key=lambda outcome: order.index(outcome.folder))


def run_jobs(jobs: list[Job], args: argparse.Namespace, check: Callable[[Job], None] | None = None) -> None:
    """Run what is not complete yet, `args.jobs` at a time. A side whose run fails is not run on; the others
    are. check: called with each complete run."""
    waiting = list(jobs)
    running: list[tuple[Job, subprocess.Popen]] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        while waiting or running:
            while waiting and len(running) < args.jobs:
                job = waiting.pop(0)
                if job.side.failed:
                    continue
                for other in jobs:
                    refuse_edited(other)
                if job.note.is_file() and (job.folder / "summary.json").is_file():
                    if check:
                        check(job)
                    continue
                say(f"{job.side.name}, {job.name} ({len(jobs) - len(waiting)} of {len(jobs)})")
                running.append((job, start(job, args.launcher)))
            for job, process in list(running):
                if process.poll() is None:
                    continue
                running.remove((job, process))
                if process.returncode or not (job.folder / "summary.json").is_file():
                    job.side.failed = f"{job.name}: {last_line(job.log, process.returncode)}"
                    say(f"{job.side.name} failed: {job.side.failed}")
                elif check:
                    check(job)
            time.sleep(POLL if running else 0)
    finally:  # a signal, or a run that cannot be compared: the others save, and go on the next time
        for _, process in running:
            process.terminate()
        for _, process in running:
            process.wait()
        signal.signal(signal.SIGTERM, before)


def start(job: Job, launcher: str) -> subprocess.Popen:
    """Start a run, with what it prints in a file."""
    job.side.folder.mkdir(parents=True, exist_ok=True)
    replace_text(job.note, json.dumps(made_of(job), indent=1))
    command = [*(shlex.split(launcher) or [sys.executable]), *job.words, "--output_dir", str(job.folder)]
    with open(job.log, "w", encoding="utf-8") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def made_of(job: Job) -> Row:
    """The words of a run, and hashes of the files that they name."""
    files = {}
    for word in job.words:
        path = Path(re.sub(r"\.py:\w+$", ".py", re.sub(r"^--\w+=", "", word)))
        if os.path.isfile(path):  # a text may be too long for Path.is_file
            files[str(path)] = hash_of(path, path.stat().st_mtime_ns)
    return {"words": job.words, "files": files}


@functools.cache
def hash_of(path: Path, changed: int) -> str:
    """The hash of a file, read once until it is changed: every start looks at the files of all runs."""
    if path.suffix == ".py":
        with contextlib.suppress(SyntaxError, ValueError):  # the run will say so
            return code_hash(path)
    return file_hash(path)


def refuse_edited(job: Job) -> None:
    """Raise UserError if a run has begun with another script, or other words."""
    then = read_object(job.note)
    if not then or not (job.folder / "metrics.jsonl").is_file():  # nothing has begun
        return
    now = made_of(job)
    start_over = f"delete {job.side.folder} to run all its seeds anew, or choose another"
    for file, digest in now["files"].items():
        if then["files"].get(file, digest) != digest:
            raise UserError(f"{file} was edited since {job.folder} was run: {start_over} name for the copy")
    if then != now:
        raise UserError(f"{job.folder} was run as `{shlex.join(then['words'])}`: {start_over} --output_dir")


def last_line(log: Path, code: int) -> str:
    """The line that says why a run ended."""
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    found = [line.strip() for line in text.split("\n") if line.strip()]
    if code < 0:
        return f"killed by signal {-code}"
    errors = [line for line in found if line.startswith("error: ")]
    return (errors or found or [f"exit code {code}"])[-1]


if __name__ == "__main__":
    as_command(main)
