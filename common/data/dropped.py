"""Rows that are left out: counted and reported by reason."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from common.data.types import BadRow, Row
from common.errors import UserError, say

T = TypeVar("T")
MOST = 20  # distinct reasons that are kept: some contain a value of the row, so there may be very many
OTHERS = "other reasons"


class Dropped:
    """Counts of left-out rows by reason, with the origins of the first ones."""

    def __init__(self, reasons: dict[str, dict[str, Any]] | None = None) -> None:
        """reasons: {reason: {"count", "first": origins}}, as returned by `facts`."""
        self.reasons = dict(reasons or {})

    def add(self, reason: str, where: str, count: int = 1) -> None:
        """Count rows; where: the origin of one of them."""
        found = self._of(reason)
        found["count"] += count
        found["first"] = [*found["first"], where][:5]

    def merge(self, other: "Dropped") -> None:
        """Add the counts of a later part of the rows."""
        for reason, found in other.reasons.items():
            mine = self._of(reason)
            mine["count"] += found["count"]
            mine["first"] = [*mine["first"], *found["first"]][:5]

    def _of(self, reason: str) -> dict[str, Any]:
        if reason not in self.reasons and len(self.reasons) >= MOST:
            reason = OTHERS
        return self.reasons.setdefault(reason, {"count": 0, "first": []})

    def facts(self) -> dict[str, dict[str, Any]]:
        """{reason: {"count", "first": origins}}, the most frequent reason first."""
        return dict(sorted(self.reasons.items(), key=lambda item: -item[1]["count"]))

    def refuse(self) -> None:
        """With --strict_data: raise UserError for the first row that was left out."""
        for reason, found in self.reasons.items():  # in order of first occurrence
            raise UserError(f"{found['first'][0]}: {reason} (--strict_data)")

    def say(self, total: int, what: str, kept: int) -> None:
        """Report the left-out rows; raises UserError if none of the `total` rows is kept."""
        for reason, found in self.facts().items():
            say(f"data: {found['count']} of {total} {what} left out: {reason} (first: {found['first'][0]})")
        if total and not kept:
            raise UserError(f"none of the {total} {what} can be used: {', '.join(self.reasons)}")


def convert(
    rows: Iterable[Row], function: Callable[[Row], T], what: str, strict: bool = False
) -> tuple[list[T], dict[str, Any]]:
    """Apply `function` to each row; rows that it rejects (BadRow) are left out, counted and reported.

    Returns the results and {"rows", "kept", "dropped": {reason: {"count", "first": origins}}}. Raises UserError, naming the
    row, if the function does; if no row is left; and, if strict, for the first rejected row.
    """
    results, dropped, total = [], Dropped(), 0
    for row in rows:
        total += 1
        try:
            results.append(function(row))
        except UserError as error:
            raise UserError(f"{row.where}: {error}") from None
        except BadRow as reason:
            dropped.add(str(reason), row.where)
            if strict:
                dropped.refuse()
    dropped.say(total, what, len(results))
    return results, {"rows": total, "kept": len(results), "dropped": dropped.facts()}
