"""Send a model to the Hub: `python -m tools.push outputs/sft --hub_model_id OWNER/NAME`.

The folder of a run, one of its checkpoints, an adapter, a merged model. What is sent: the model, the tokenizer, README.md
if there is one. What is not: optimizer, logs, samples, anything else.
"""

import argparse
from pathlib import Path

from common.errors import UserError, as_command
from common.run.hub import check_repo, read_card, reason_of, upload


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m tools.push", description="send a model to the Hub")
    parser.add_argument("folder", help="output folder of a run, checkpoint, adapter, merged model")
    parser.add_argument("--hub_model_id", required=True, help="OWNER/NAME; it is created where it is not there")
    parser.add_argument("--hub_private_repo", action="store_true", help="a new repository is private")
    args = parser.parse_args(argv)
    folder = Path(args.folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    check_repo(args.hub_model_id)
    try:
        upload(folder, args.hub_model_id, args.hub_private_repo, read_card(folder), folder.resolve().name)
    except UserError:
        raise
    except Exception as error:  # the network, or what the Hub says
        raise UserError(f"{folder} was not sent to {args.hub_model_id} ({reason_of(error)})") from None
    print(f"{args.hub_model_id}: {folder} is there")


if __name__ == "__main__":
    as_command(main)
