"""Push a model to the Hub: `python -m tools.push outputs/sft --hub_model_id OWNER/NAME`.

The model is the folder of a run, one of its checkpoints, an adapter, or a merged model. Only the model, the tokenizer and
README.md (if there is one) are pushed: no optimizer, logs, samples, or anything else.
"""

import argparse
from pathlib import Path

from common.errors import UserError, as_command
from common.run.hub import check_repo, read_card, reason_of, upload


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m tools.push", description="push a model to the Hub")
    parser.add_argument("folder", help="output folder of a run, checkpoint, adapter, merged model")
    parser.add_argument("--hub_model_id", required=True, help="OWNER/NAME; created if missing")
    parser.add_argument("--hub_private_repo", action="store_true", help="make a new repository private")
    args = parser.parse_args(argv)
    folder = Path(args.folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    check_repo(args.hub_model_id)
    try:
        upload(folder, args.hub_model_id, args.hub_private_repo, read_card(folder), folder.resolve().name)
    except UserError:
        raise
    except Exception as error:  # the network, or an error from the Hub
        raise UserError(f"{folder} was not sent to {args.hub_model_id} ({reason_of(error)})") from None
    print(f"{args.hub_model_id}: {folder} is there")


if __name__ == "__main__":
    as_command(main)
