"""Benchmarks with lm-evaluation-harness: `python -m tools.lm_eval outputs/sft arc_easy hellaswag`.

The model is the folder of a run, one of its checkpoints, an adapter, or a name on the Hub. Needs `pip install
"lm-eval[hf]"`. Tasks are named; they load their data from the Hub, or are your own, from the YAML files of --include_path.
"""

import argparse
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from common.errors import UserError, as_command, quoted
from tools.chat import load


def harness() -> Any:
    """The lm_eval package, rather than this file. Raises UserError if it is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError('tools.lm_eval needs lm-evaluation-harness: pip install "lm-eval[hf]"')
    return importlib.import_module("lm_eval")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m tools.lm_eval", description="benchmarks by lm-evaluation-harness")
    parser.add_argument("model", help="output folder of a run, checkpoint, adapter, or Hub name")
    parser.add_argument("tasks", nargs="+", help="names of tasks")
    parser.add_argument("--include_path", help="folder with tasks of your own")
    parser.add_argument("--num_fewshot", type=int, help="examples in the prompt; unset: the task's own")
    parser.add_argument("--limit", type=float, help="rows of each task, or a share below 1")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--apply_chat_template", action="store_true", help="ask as a user, in the model's template")
    parser.add_argument("--output", help="file for all results, as JSON")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    args = parser.parse_args(argv)
    if (
        args.batch_size < 1 or (args.num_fewshot or 0) < 0 or (args.limit is not None and not args.limit > 0)
    ):  # lm-eval accepts it
        raise UserError("--batch_size is at least 1, --num_fewshot from 0 on, --limit above 0")
    if args.output and not Path(args.output).resolve().parent.is_dir():
        raise UserError(f"--output {args.output}: there is no such folder")
    lm_eval = harness()
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lm, tokenizer = load(args.model, trust_remote_code=args.trust_remote_code)
    manager = TaskManager(include_path=args.include_path)
    if unknown := [name for name in args.tasks if name not in manager.all_tasks]:
        raise UserError(f"{', '.join(unknown)}: no task of lm-eval {lm_eval.__version__} (--include_path for your own)")
    try:
        found = lm_eval.simple_evaluate(
            model=HFLM(pretrained=lm, tokenizer=tokenizer, batch_size=args.batch_size),
            tasks=args.tasks,
            task_manager=manager,
            num_fewshot=args.num_fewshot,
            limit=args.limit,
            apply_chat_template=args.apply_chat_template,
        )
    except Exception as error:  # from the harness, its data sets or the network
        raise UserError(f"lm-eval: {type(error).__name__}: {quoted(error, 400, str)}") from None
    print(f"{'task':30} {'metric':24} {'value':>10} {'± stderr':>10}")
    for task, values in found["results"].items():
        for key, value in values.items():
            name = key.removesuffix(",none")
            if isinstance(value, int | float) and "_stderr" not in key and name not in ("sample_len",):
                spread = values.get(key.replace(",", "_stderr,", 1), "")
                print(f"{task:30} {name:24} {value:10.4f} {spread if isinstance(spread, str) else f'{spread:.4f}':>10}")
    if args.output:
        kept = {name: found[name] for name in ("results", "versions", "n-shot", "n-samples") if name in found}
        Path(args.output).write_text(json.dumps(kept, indent=2, default=str), encoding="utf-8")


if __name__ == "__main__":
    as_command(main)
