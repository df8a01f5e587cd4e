"""Push a model to the Hub: `python -m tools.push outputs/sft --hub_model_id OWNER/NAME`.

The model is the folder of a run, one of its checkpoints, an adapter, or a merged model. Only the model, the
tokenizer and README.md (if there is one) are pushed: no optimizer, logs, samples, or anything else.
"""

import argparse
from pathlib import Path

from common.errors import UserError
from common.run.parts.hub import check_repo, push

from tools import as_command


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m tools.push", description="push a model to the Hub")
    parser.add_argument("folder", help="output folder of a run, checkpoint, adapter, merged model")
    parser.add_argument(
        "--hub_model_id", required=True, help="OWNER/NAME; created if missing, for everybody to see"
    )
    args = parser.parse_args(argv)
    folder = Path(args.folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    check_repo(args.hub_model_id)
    print(f"{folder} is at {push(folder, args.hub_model_id)}")


if __name__ == "__main__":
    as_command(main)
