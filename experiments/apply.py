"""Write an experiment that is kept as a diff from one of the four scripts: `python -m experiments.apply ema`.

This writes experiments/train_ema.py, a script like the other experiments. `git apply experiments/ema.diff`
writes the same file; this command needs no git, and finds the lines of a change wherever they have moved to.

    python -m experiments.apply ema mtp          # without names: all of them
    python -m experiments.apply --refresh ema    # writes ema.diff anew, from the script and train_ema.py

To change a script that an experiment starts from: apply the diff, make the change in both files, refresh.
"""

import argparse
import difflib
from pathlib import Path
import re
from typing import NamedTuple

from common.errors import UserError, say, show_and_exit

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.diff"))
CONTEXT = 2  # lines around a change, by which its place is found


class Hunk(NamedTuple):
    """A place of the parent, its lines and what they become."""

    section: str  # the function or class, for messages
    before: list[str]
    after: list[str]


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def read_diff(name: str) -> tuple[str, list[Hunk]]:
    """(parent, hunks): "train_sft.py", and its changes from top to bottom."""
    parent = ""
    hunks: list[Hunk] = []
    for line in lines_of(FOLDER / f"{name}.diff"):
        if line.startswith("copy from "):
            parent = line.removeprefix("copy from ")
        elif line.startswith("@@"):
            section = line.split("@@")[2].strip()
            hunks.append(Hunk(section, before=[], after=[]))
        elif hunks:  # below the head of the file
            kind, text = line[:1], line[1:]
            if kind != "+":
                hunks[-1].before.append(text)
            if kind != "-":
                hunks[-1].after.append(text)
    return parent, hunks


def apply(name: str) -> str:
    """The experiment as text. UserError if its parent has the lines of a change not at all, or more than
    once."""
    parent, hunks = read_diff(name)
    lines = lines_of(ROOT / parent)
    first = 0  # the changes stand in the order of the file
    for hunk in hunks:
        size = len(hunk.before)
        places = [i for i in range(first, len(lines)) if lines[i : i + size] == hunk.before]
        if len(places) != 1:
            raise UserError(
                f"experiments/{name}.diff: {parent} has {len(places)} places, not 1, for the change to "
                f"`{hunk.section or 'its top'}`: it was edited. For maintainers: git apply --reject "
                f"experiments/{name}.diff, make that change by hand, python -m experiments.apply --refresh {name}"
            )
        place = places[0]
        lines[place : place + size] = hunk.after
        first = place + len(hunk.after)
    return "\n".join(lines) + "\n"


def make_diff(name: str) -> str:
    """The diff from the parent to experiments/train_NAME.py, in the form that git applies to a copy."""
    parent, _ = read_diff(name)
    script = f"experiments/train_{name}.py"
    old, new = lines_of(ROOT / parent), lines_of(ROOT / script)
    written = [f"diff --git a/{parent} b/{script}", f"copy from {parent}", f"copy to {script}"]
    for line in difflib.unified_diff(old, new, f"a/{parent}", f"b/{script}", n=CONTEXT, lineterm=""):
        if line.startswith("@@"):
            start = int(re.match(r"@@ -(\d+)", line)[1])
            above = "\n".join(old[: start + CONTEXT - 1])
            sections = re.findall(r"^ *((?:def|class) \w+)", above, re.M)
            if sections:
                line = f"{line} {sections[-1]}"
        written.append(line)
    return "\n".join(written) + "\n"


def write(name: str) -> None:
    path = FOLDER / f"train_{name}.py"
    text = apply(name)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise UserError(f"experiments/{path.name} exists, with other lines: rename or delete it")
    path.write_text(text, encoding="utf-8")
    say(f"experiments/{path.name}: python -m experiments.train_{name}")


def refresh(name: str) -> None:
    path = FOLDER / f"{name}.diff"
    path.write_text(make_diff(name), encoding="utf-8")
    if apply(name).splitlines() != lines_of(FOLDER / f"train_{name}.py"):
        raise UserError(f"experiments/{path.name} does not give train_{name}.py again")
    say(f"experiments/{path.name} is written anew")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m experiments.apply", description="write the experiments that are kept as diffs"
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)} (default: all)", metavar="NAME")
    parser.add_argument(
        "--refresh", action="store_true", help="write the diffs anew, from the scripts as they are now"
    )
    args = parser.parse_args(argv)
    for name in args.names or NAMES:
        if name not in NAMES:
            raise UserError(f"there is no experiments/{name}.diff, but {', '.join(NAMES)}")
        if args.refresh:
            refresh(name)
        else:
            write(name)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        show_and_exit(error)
