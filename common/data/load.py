"""From sources to the samples of a run: tokenised and cached or streamed, mixed, and in order."""

from collections.abc import Callable
from typing import Any

from common.data.cache import number_in, tokenize
from common.data.examples import Units
from common.data.order import Order, Shuffled
from common.data.sources import Source, convert, read_rows
from common.data.stream import Stream
from common.errors import UserError

import numpy as np


def load_units(
    accelerator: Any,
    args: Any,
    sources: list[Source],
    make_units: Callable[..., Any],
    tokenizer: Any,
    settings: dict[str, Any],
    curriculum_column: str | None = None,
) -> Units:
    """All rows of the sources as units (see cache.tokenize)."""
    return tokenize(
        accelerator,
        sources,
        make_units,
        tokenizer,
        settings,
        cache_dir=args.dataset_cache_dir,
        num_proc=args.dataset_num_proc,
        strict=args.strict_data,
        curriculum_column=curriculum_column,
    )


def load_samples(
    accelerator: Any,
    args: Any,
    sources: list[Source],
    make_units: Callable[..., Any],
    arrange: Callable[[Units, Any], Any],
    tokenizer: Any,
    settings: dict[str, Any],
    turn_dropping: float = 0.0,
) -> Shuffled | Stream:
    """The unit at each position of the run. arrange(units, args): packs or cuts; before it, they are `samples.data`."""
    check_order(args)
    if not 0 <= turn_dropping <= 1:
        raise UserError(f"--turn_dropping is a probability, not {turn_dropping}")
    if args.dataset_streaming:
        if args.max_steps <= 0:
            raise UserError("--dataset_streaming: a stream has no known end: say how long to train with --max_steps")
        if args.curriculum_column or turn_dropping:
            raise UserError("--dataset_streaming: no --curriculum_column and no --turn_dropping: they need all rows at hand")
        job = (make_units, tokenizer, settings, None)
        return Stream(
            sources,
            job,
            lambda units: arrange(units, args),
            args.seed,
            block_rows=args.streaming_buffer_size,
            num_proc=args.dataset_num_proc or 1,
            strict=args.strict_data,
        )
    data = load_units(accelerator, args, sources, make_units, tokenizer, settings, args.curriculum_column)
    units = arrange(data, args)
    return Shuffled(units, make_order(args, sources, units), data, turn_dropping)


class Items:
    """Rows of several sources, each as what a function makes of it, in memory: one source after the other."""

    def __init__(
        self,
        sources: list[Source],
        function: Callable[[dict[str, Any], str], dict[str, Any]],
        what: str,
        strict: bool = False,
        curriculum_column: str | None = None,
    ):
        """function(columns, format): an item, with its token ids under prompt_ids. strict: see cache.tokenize."""
        self.items: list[dict[str, Any]] = []
        self.sources, self.counts, self._facts = sources, [], []
        column = None if curriculum_column == "length" else curriculum_column

        def make(columns: dict[str, Any], format: str) -> dict[str, Any]:
            item = function(columns, format)
            if column:
                number_in(item, column)  # a row without one is left out
            return item

        for source in sources:
            rows = (row for row, _ in read_rows(source))
            items, facts = convert(rows, lambda columns, f=source.format: make(columns, f), what, strict)
            self.items += items
            self.counts.append(len(items))
            tokens = sum(len(item["prompt_ids"]) for item in items)
            about = {"source": source.label, "path": source.path, "split": source.split, "format": source.format}
            facts = {"rows": facts["rows"], "units": len(items), "tokens": tokens, "dropped": facts["dropped"]}
            self._facts.append(about | {"weight": source.weight} | facts)
        self.lengths = np.array([len(item["prompt_ids"]) for item in self.items], np.int64)
        self.longest = max(self.lengths.tolist(), default=0)
        self.difficulty = None
        if curriculum_column == "length":
            self.difficulty = self.lengths
        elif column:
            self.difficulty = np.array([number_in(item, column) for item in self.items])

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.items[i]

    def facts(self) -> list[dict[str, Any]]:
        """Of each source: what it is, rows, items, tokens, what was left out and why."""
        return self._facts


def make_order(args: Any, sources: list[Source], units: Any) -> Order:
    """The order of units (`counts` of each source, `difficulty`) that the arguments ask for."""
    check_order(args)
    weights = None if sources[0].weight is None else [source.weight for source in sources]
    fraction = args.curriculum_fraction if args.curriculum_column else 0.0
    return Order(units.counts, args.seed, weights=weights, difficulty=units.difficulty, curriculum=fraction)


def check_order(args: Any) -> None:
    if not 0 < args.curriculum_fraction <= 1:
        raise UserError(f"--curriculum_fraction is a share between 0 and 1, not {args.curriculum_fraction}")
