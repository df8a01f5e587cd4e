"""Does a model still do what it could? `python -m tools.regression outputs/sft suite.jsonl --baseline
data/base_model`.

Answers every case of the suite (docs/regression.md) and prints the rates by group with their 95 % intervals.
With --baseline (another model, or the last line of a regression.jsonl) it exits with code 1 if a group has
fallen by more than chance: McNemar's exact test, one-sided, on the cases that both have answered.
"""

import argparse
import json
from pathlib import Path

from common.args import CommonArgs
from common.errors import UserError, printable, say
from common.model import load_model, load_tokenizer
from common.processes import Accelerator
from common.run.parts.regression import ALL, ALPHA, Cases, Change, Outcome, Suite, compare
import torch

from tools import as_command

SHOWN = 100  # characters of an answer


def answer(name: str, suite: Suite, accelerator: Accelerator, args: argparse.Namespace) -> Outcome:
    """Evaluate a model on the suite. Raises UserError if it cannot be loaded."""
    options = CommonArgs(model_name_or_path=name, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    options.chat_template = args.chat_template
    tokenizer = load_tokenizer(options)
    model = load_model(options, accelerator, tokenizer).eval()
    suite.tokenize(tokenizer, model, args.max_new_tokens)
    return suite.run(model, tokenizer, accelerator)


def read_cases(path: str, max_new_tokens: int) -> Cases:
    """The cases in the last line of a regression.jsonl."""
    try:
        line = json.loads(Path(path).read_text(encoding="utf-8").strip().split("\n")[-1])
        cases, limit = line["cases"], line["max_new_tokens"]
        assert all(
            isinstance(case["rate"], int | float) and isinstance(case["digest"], str)
            for case in cases.values()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise UserError(f"--baseline {path}: no regression.jsonl ({type(error).__name__}: {error})") from None
    if limit != max_new_tokens:
        raise UserError(f"--baseline {path}: its answers had --max_new_tokens {limit}, here {max_new_tokens}")
    return cases


def table(found: Outcome, before: Cases, changes: dict[str, Change]) -> list[str]:
    """The rates as lines of a table, one per group, with what has changed, if `changes` has something."""
    width = max(map(len, found["groups"]))
    head = f"{'group':{width}}  {'passed':>9}  {'rate':>5}  95 % interval"
    if changes:
        head += "  before  fell  rose      p"
    lines = [head]
    for group, n in found["groups"].items():
        line = f"{group:{width}}  {n['passed']:>4}/{n['total']:<4}  {n['rate']:5.2f}  {n['low']:.2f} - {n['high']:.2f}  "
        if changes:
            change = changes[group]
            both = [before[name]["rate"] for name in (*change.fell, *change.rose, *change.same)]
            then = f"{sum(both) / len(both):.2f}" if both else "-"
            line += f"  {then:>6}  {len(change.fell):>4}  {len(change.rose):>4}  {change.p:5.3f}"
        lines.append(line.rstrip())
    return lines


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m tools.regression", description="does a model still do what it could?"
    )
    parser.add_argument("model", help="output folder of a run, checkpoint, adapter, or Hub name")
    parser.add_argument("suite", help="file of cases (docs/regression.md)")
    parser.add_argument(
        "--baseline", help="another model, or a regression.jsonl (its last line), to compare with"
    )
    parser.add_argument("--alpha", type=float, default=ALPHA, help=f"significance level of a fall ({ALPHA})")
    parser.add_argument("--strict", action="store_true", help="any case that only the baseline passes counts")
    parser.add_argument("--save", help="add a line to this file, which can be a --baseline later")
    parser.add_argument(
        "--max_new_tokens", type=int, default=128, help="limit for cases without max_tokens (128)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the weights (float32)"
    )
    parser.add_argument("--chat_template", help="chatml, plain, or a .jinja file; unset: the tokenizer's own")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run Python code that comes with the model"
    )
    args = parser.parse_args(argv)
    if not 0 < args.alpha < 1 or args.max_new_tokens < 1:
        raise UserError("--alpha is between 0 and 1, --max_new_tokens at least 1")

    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    suite = Suite(args.suite, accelerator.device)
    before = None
    if args.baseline and Path(args.baseline).is_file():
        before = read_cases(args.baseline, args.max_new_tokens)
    elif args.baseline:
        before = answer(args.baseline, suite, accelerator, args)["cases"]
    found = answer(args.model, suite, accelerator, args)
    code = verdict(found, before, args)
    # a model that has fallen does not become the next baseline
    if args.save and accelerator.is_main_process and (code == 0 or args.save != args.baseline):
        line = {"model": args.model, "max_new_tokens": args.max_new_tokens} | found
        with open(args.save, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return code


def verdict(found: Outcome, before: Cases | None, args: argparse.Namespace) -> int:
    """Print the rates, and what has changed since the baseline; returns the exit code."""
    changes = {} if before is None else compare(before, found["cases"])
    say("\n".join(table(found, before or {}, changes)))
    if before is None:
        return 0
    change = changes[ALL]
    compared = {*change.fell, *change.rose, *change.same}
    if not compared:
        raise UserError(
            f"--baseline {args.baseline}: it has none of the cases of {args.suite} as they are now"
        )

    for name in change.fell:
        say(f"fell: {name}: {found['failed'][name]['why']}; {found['failed'][name]['completion'][:SHOWN]!r}")
    if change.rose:
        say(f"rose: {', '.join(change.rose)}")
    if new := found["cases"].keys() - compared:
        say(f"not compared, new or edited since: {', '.join(sorted(new))}")
    worse = [f"{group} (p = {change.p:.2g})" for group, change in changes.items() if change.p < args.alpha]
    if worse:
        say(f"FALLEN since {args.baseline}: {', '.join(worse)}, by McNemar's exact test, one-sided")
    elif args.strict and change.fell:
        say(f"FALLEN since {args.baseline}: {len(change.fell)} cases (--strict)")
    else:
        say(f"no group has fallen since {printable(args.baseline)} by more than chance (p < {args.alpha:g})")
        return 0
    return 1


if __name__ == "__main__":
    as_command(main)
