"""The cache of tokenised data: each source is tokenised once, in parallel, into memory-mapped files that later runs use.

A source's folder holds the token ids of all its sequences end to end (uint16 or uint32), the mask of trained tokens, any
further fields, the offsets of the sequences, and facts about the rows. Its name is a hash of everything that it depends on
(cache_key.py).
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.args import CommonArgs
from common.data.cache_key import cache_key
from common.data.dropped import Dropped
from common.data.encoding import Encode, Job, Layout, agree, encode_all
from common.data.examples import Examples, TokenFile
from common.data.folders import build_once, content
from common.data.sources import Source, read_rows
from common.data.types import Tokenizer
from common.errors import printable

import numpy as np
from tqdm import tqdm

if TYPE_CHECKING:
    from accelerate import Accelerator


def tokenize(
    args: CommonArgs,
    accelerator: "Accelerator",
    sources: list[Source],
    encode: Encode,
    tokenizer: Tokenizer,
    curriculum_column: str | None = None,
) -> Examples:
    """All rows of the sources as examples, from the cache where available. Called on every process.

    encode(row, tokenizer, args): the sequences of a row, or its text, which becomes a document. A BadRow that it raises is
    counted (with strict_data, an error); a UserError ends the run. See cache_key.py for the cache key.
    """
    column = None if curriculum_column == "length" else curriculum_column
    job, files = Job(encode, tokenizer, args, column), []
    for source in sources:
        folder = Path(args.dataset_cache_dir, f"{source.label}-{cache_key(source, *job)}")
        build_once(accelerator, folder, lambda into, source=source: _build(source, job, into))
        file = _open(folder)
        dropped = Dropped(file.facts["dropped"])
        dropped.say(file.facts["rows"], f"rows of {source.label}", len(file.starts))
        if args.strict_data:
            dropped.refuse()
        files.append(file)
    examples = Examples(files, sources)
    if curriculum_column == "length":
        examples.difficulty = examples.lengths
    elif column:
        examples.difficulty = np.concatenate([file.difficulty for file in files] or [np.zeros(0)])
    return examples


def _build(source: Source, job: Job, folder: Path) -> None:
    """Tokenise a source into a folder. Raises UserError if the rows cannot be used."""
    facts: dict[str, Any] = {"rows": 0, "examples": 0, "tokens": 0, "trained_tokens": 0, "dtype": "uint16"}
    dropped, columns = Dropped(), []
    layout: Layout | None = None
    bar = tqdm(desc=printable(f"tokenising {source.label}"), unit=" rows", mininterval=1, delay=2)
    with ExitStack() as stack:
        stack.enter_context(bar)
        files = {name: stack.enter_context(open(folder / f"{name}.bin", "wb")) for name in ("ids", "mask")}
        for count, encoded in encode_all(enumerate(row for row, _ in read_rows(source)), job, job.args.dataset_num_proc):
            layout = agree(layout, encoded.layout)
            encoded.ids.tofile(files["ids"])
            encoded.mask.tofile(files["mask"])
            for number, name in enumerate(layout.fields if encoded.layout else ()):  # names may contain any character
                if (file := f"field-{number}") not in files:
                    files[file] = stack.enter_context(open(folder / f"{file}.bin", "wb"))
                encoded.fields[name].tofile(files[file])
            columns.append((encoded.lengths, encoded.rows, encoded.difficulty))
            facts["rows"] += count
            facts["examples"] += len(encoded.rows)
            facts["tokens"] += len(encoded.ids)
            facts["trained_tokens"] += int(encoded.mask.sum(dtype=np.int64))
            facts["dtype"] = str(encoded.ids.dtype)
            dropped.merge(encoded.dropped)
            bar.update(count)
            if job.args.strict_data:
                dropped.refuse()
    if facts["trained_tokens"] == facts["tokens"]:
        (folder / "mask.bin").unlink()
    for name, parts in zip(("lengths", "rows", "difficulty"), zip(*columns, strict=True), strict=True):
        np.save(folder / f"{name}.npy", np.concatenate(parts))
    facts["per_example"], facts["fields"] = (layout.per_example, layout.fields) if layout else (1, {})
    facts["dropped"] = dropped.reasons
    (folder / "facts.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")


def _open(folder: Path) -> TokenFile:
    """Open a folder written by _build, with its tokens memory-mapped."""
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    fields = [f"field-{number}.bin" for number in range(len(facts["fields"]))]
    facts["digest"] = content(folder, "ids.bin", "mask.bin", "lengths.npy", "rows.npy", "difficulty.npy", *fields)
    lengths, rows, difficulty = (np.load(folder / f"{name}.npy") for name in ("lengths", "rows", "difficulty"))
    ends = np.cumsum(lengths)

    def mapped(name: str, dtype: str) -> np.ndarray:
        if not facts["tokens"]:
            return np.zeros(0, dtype)
        return np.asarray(np.memmap(folder / f"{name}.bin", dtype, "r"))  # slicing a memmap itself takes three times as long

    per_token, per_sequence = {}, {}
    for number, (name, (is_per_token, dtype)) in enumerate(facts["fields"].items()):
        if is_per_token:
            per_token[name] = mapped(f"field-{number}", dtype)
        else:
            per_sequence[name] = np.fromfile(folder / f"field-{number}.bin", dtype)
    mask = mapped("mask", "uint8") if (folder / "mask.bin").exists() else None
    starts, each = ends - lengths, facts["per_example"]
    ids = mapped("ids", facts["dtype"])
    return TokenFile(ids, mask, starts, ends, each, rows, difficulty, facts, per_token, per_sequence)
