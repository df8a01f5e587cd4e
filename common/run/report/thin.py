"""A log of any length in bounded space: curves as buckets that keep their minimum and maximum, lists thinned evenly.

Both consume their input line by line, so a report costs only as much as was logged since the last one.
"""

import json
import math
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class Curve:
    """A metric over the steps, in at most `most` buckets of equally many neighbouring values.

    At first each value has its own bucket; when there are too many, neighbouring buckets are merged in pairs. A bucket keeps
    the mean, minimum and maximum of its values: no peak is lost.
    """

    def __init__(self, most: int):
        """most: an even number."""
        self.most, self.size, self.missing = most, 1, 0  # size: values per bucket; missing: values that were not finite
        self.buckets: list[list[float]] = []  # [first step, last step, sum, count, minimum, maximum]

    def add(self, step: float, value: float | None) -> None:
        """Add a value; None, or one that is not finite, is only counted."""
        if value is None or not math.isfinite(value):
            self.missing += 1
            return
        if self.buckets and self.buckets[-1][3] < self.size:
            _merge(self.buckets[-1], [step, step, value, 1, value, value])
            return
        if len(self.buckets) == self.most:
            for left, right in zip(self.buckets[::2], self.buckets[1::2], strict=True):
                _merge(left, right)
            self.buckets, self.size = self.buckets[::2], 2 * self.size
        self.buckets.append([step, step, value, 1, value, value])

    def range(self) -> tuple[float, float]:
        """(minimum, maximum) of all values; NaN if there are none."""
        if not self.buckets:
            return math.nan, math.nan
        return min(bucket[4] for bucket in self.buckets), max(bucket[5] for bucket in self.buckets)

    def numbers(self, most: int) -> int:
        """How many numbers a table of at most `most` points has, not counting its steps, which curves share."""
        points = len(self.buckets)
        while points > most:
            points = (points + 1) // 2
        return points if self.size == 1 and points == len(self.buckets) else 3 * points

    def table(self, most: int | None = None) -> dict[str, Any]:
        """{"x": steps, "y": values}; for merged values y is their mean, and "low" and "high" are their range.

        most: points; None: all that are kept.
        """
        buckets, size = self.buckets, self.size
        while most and len(buckets) > most:
            pairs = [(buckets[i], buckets[i + 1 : i + 2]) for i in range(0, len(buckets), 2)]
            buckets, size = [[*left] for left, _ in pairs], 2 * size
            for bucket, (_, right) in zip(buckets, pairs, strict=True):
                if right:
                    _merge(bucket, right[0])
        found: dict[str, Any] = {
            "x": [round((first + last) / 2) for first, last, *_ in buckets],
            "y": [short(total / count) for _, _, total, count, _, _ in buckets],
        }
        if size > 1:
            found["low"], found["high"] = ([short(bucket[k]) for bucket in buckets] for k in (4, 5))
            found["size"] = size
        return found | ({"missing": self.missing} if self.missing else {})


def _merge(left: list[float], right: list[float]) -> None:
    left[1] = right[1]
    left[2] += right[2]
    left[3] += right[3]
    left[4], left[5] = min(left[4], right[4]), max(left[5], right[5])


class Spread(Generic[Item]):
    """At most `most` of the items added, evenly spread, plus the last one."""

    def __init__(self, most: int):
        """most: an even number."""
        self.most, self.stride, self.count = most, 1, 0
        self.kept: list[Item] = []
        self.last: Item | None = None

    def add(self, item: Item) -> None:
        if len(self.kept) == self.most and self.count % self.stride == 0:
            self.kept, self.stride = self.kept[::2], 2 * self.stride
        if self.count % self.stride == 0:
            self.kept.append(item)
        self.last = item
        self.count += 1

    def items(self) -> list[Item]:
        at_end = not self.count or (self.count - 1) % self.stride == 0
        return self.kept if at_end else [*self.kept, self.last]


def short(value: float) -> float | int:
    """A number rounded to the five digits that a page shows."""
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def weight(text: str) -> int:
    """The bytes that a text takes in a page, where escaped characters take six."""
    return len(json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")) + 5 * text.count("<")
