"""One page for one or several runs: overlaid curves, settings that differ, and samples.

python -m tools.report outputs/sft                          # rewrites outputs/sft/report.html
python -m tools.report outputs/sft outputs/sft_lr3e-3       # one page that compares them, comparison.html
python -m tools.report outputs/* --to pages/all.html
"""

import argparse
from pathlib import Path

from common.errors import UserError, as_command, say
from common.extras.report import write_report

MOST = 8  # runs on a page: more colours would be hard to tell apart


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="output folders; the others are compared with the first one")
    parser.add_argument("--to", help="output file; unset: report.html in the folder, or for several comparison.html here")
    args = parser.parse_args(words)
    if len(args.folders) > MOST:
        raise UserError(f"{len(args.folders)} folders: a page compares {MOST} at most")
    for folder in args.folders:
        if not any(Path(folder, name).is_file() for name in ("metrics.jsonl", "args.yaml", "summary.json")):
            raise UserError(f"{folder} is not the output folder of a run: it has neither metrics.jsonl nor args.yaml")
    file = Path(args.to or ("comparison.html" if len(args.folders) > 1 else Path(args.folders[0], "report.html")))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_report(args.folders, file)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error}") from None
    say(f"{file}: open it in a browser")


if __name__ == "__main__":
    as_command(main)
