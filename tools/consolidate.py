"""Turn a sharded checkpoint into a model folder: `python -m tools.consolidate outputs/sft/checkpoint-500 model`.

Runs on one process, which holds a few tensors at a time; temporarily the disk needs twice the size of the weights. They stay
as trained (float32). The result is readable by from_pretrained, with tokenizer and extra.safetensors.
"""

import argparse
import shutil
from pathlib import Path

from common.errors import UserError, as_command, say
from common.files import find_damage
from common.model.shards import holds_shards
from common.run.consolidate import consolidate


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m tools.consolidate", description="sharded checkpoint -> model folder")
    parser.add_argument("checkpoint", help="a checkpoint of a run with --sharded_checkpoints")
    parser.add_argument("out", help="folder to write the model to")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    args = parser.parse_args(argv)
    checkpoint, out = Path(args.checkpoint), Path(args.out)
    if not holds_shards(checkpoint):
        there = "its model can be loaded as it is" if checkpoint.is_dir() else "there is no such folder"
        raise UserError(f"{checkpoint} is no sharded checkpoint: {there}")
    if problem := find_damage(checkpoint):
        raise UserError(f"{checkpoint}: {problem}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already: name a folder that is not")
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        consolidate(checkpoint, temporary, trust_remote_code=args.trust_remote_code)
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except OSError as error:
        raise UserError(f"{out} could not be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    say(f"{checkpoint} as a model: {out}")


if __name__ == "__main__":
    as_command(main)
