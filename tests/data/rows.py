"""What the tests of data share: files of rows, what is read of them, examples, and one process's
accelerator."""

import functools
import json
from types import SimpleNamespace

import accelerate
from common.args import CommonArgs
from common.data.encode import Layout
from common.data.examples import Examples, TokenFile
from common.data.sources import Source, find_sources, read_rows
import numpy as np
import torch
from transformers import AutoTokenizer

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


@functools.cache
def base_tokenizer():
    return AutoTokenizer.from_pretrained("data/base_model")


def alone():
    """The accelerator of a run of one process."""
    return accelerate.Accelerator(cpu=True)


def process(rank=0, world=1, accumulation=1):
    """The accelerator of one of several, as far as batches ask it."""
    is_main, device = rank == 0, torch.device("cpu")
    known = {"gradient_accumulation_steps": accumulation, "device": device, "is_main_process": is_main}
    return SimpleNamespace(process_index=rank, num_processes=world, **known)


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def jsonl(path, rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def numbered(path, count, start=0):
    return jsonl(path, [{"text": f"row {i}"} for i in range(start, start + count)])


def arguments(tmp_path, *names, **settings):
    """All shared arguments of a run, with these sources."""
    names = [name if isinstance(name, str) else json.dumps(name) for name in names]
    defaults = {"dataset_cache_dir": str(tmp_path / "cache"), "dataset_num_proc": 1, "max_steps": 5}
    return CommonArgs(**{"dataset_name": names} | defaults | settings)


def columns(source, cursor=None):
    return [
        row for row, _ in read_rows(source if isinstance(source, Source) else Source(str(source)), cursor)
    ]


def texts(source):
    return [row["text"] for row in columns(source)]


def found(*names, **settings):
    """find_sources with the defaults of the flags."""
    names = [name if isinstance(name, str) else json.dumps(name) for name in names]
    return find_sources(CommonArgs(dataset_name=names, **settings))


def token_file(lengths, fields, each=1):
    """Sequences of these lengths, end to end, without shared tokens: `each` of them make an example. fields:
    numbers for each token."""
    lengths = np.asarray(lengths, np.int64)
    ends = np.cumsum(lengths)
    count = len(lengths) // each
    layout = Layout({name: ("token", str(values.dtype)) for name, values in fields.items()}, "")
    return TokenFile(
        layout=layout,
        starts=ends - lengths,
        ends=ends,
        counts=np.full(count, each),
        sizes=lengths.reshape(-1, each).sum(1),
        rows=np.arange(count),
        difficulty=np.full(count, np.nan),
        fields=fields,
        facts={},
    )


def make_examples(sources, difficulty=None, pairs=False, by_place=False):
    """Examples of these many tokens in each source, which are the number of the example, or their place in
    the source; those of `pairs` have two sequences."""
    files, first = [], 0
    for lengths in sources:
        rows, sizes = np.arange(len(lengths)), np.array(lengths)
        ids = np.arange(sum(lengths)) if by_place else np.repeat(first + rows, lengths)
        if pairs:
            sizes = np.stack([sizes // 2, sizes - sizes // 2], 1).flatten()
        values = (
            np.full(len(rows), np.nan)
            if difficulty is None
            else np.array(difficulty[first:][: len(rows)], float)
        )
        data = {"input_ids": ids, "loss_mask": np.ones(len(ids), int)}
        files.append(token_file(sizes, data, each=1 + pairs)._replace(difficulty=values))
        first += len(lengths)
    return Examples(files, [Source(f"source {s}") for s in range(len(files))])


def ids(data, count):
    return [[sequence["input_ids"].tolist() for sequence in data[i]] for i in range(count)]


def lognormal(count, seed=0, most=4000):
    return np.clip(np.random.default_rng(seed).lognormal(5.5, 1.0, count), 2, most).astype(int)


def flat(nested):
    return [i for part in nested for i in (flat(part) if isinstance(part, list) else [part])]


def cost(n):
    return n + n * n / 12288


def line(caught) -> str:
    """The error, which is one line."""
    assert "\n" not in str(caught.value)
    return str(caught.value)
