"""Merge a finished LoRA adapter into its base: `python -m tools.merge_lora outputs/sft merged`.

The base is the one that the adapter names, loaded in its own dtype; the result is a model that does not need
peft. The merged folder contains the adapter's tokenizer, generation_config.json and extra.safetensors.
"""

import argparse

from common.model.merge import merge_adapter

from tools import as_command


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m tools.merge_lora", description="merge a LoRA adapter into its base"
    )
    parser.add_argument(
        "adapter", help="folder of the adapter, such as the output_dir of a run with --use_peft"
    )
    parser.add_argument("out", help="folder to write the model to")
    parser.add_argument("--base", help="base model, if not the one that the adapter names")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run Python code that comes with the base"
    )
    args = parser.parse_args(argv)
    merge_adapter(args.adapter, args.out, args.base, trust_remote_code=args.trust_remote_code)


if __name__ == "__main__":
    as_command(main)
