"""benchmarks/scale.py: bytes of a window by hand, and its simulation on few chats."""

from pathlib import Path

import pytest

from benchmarks.scale import traffic, traffic_table

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "kind, gpus, micro_batches, gpu, machine",
    [
        ("ddp", 8, 16, 7.0, 0),  # 2 x 7/8 x 4 GB of gradients: the last micro-batch alone synchronises
        ("fsdp2", 8, 4, 17.5, 0),  # 7/8 x (4 x (2 forward + 2 backward) + 4 GB of gradients)
        ("hsdp", 64, 4, 18.375, 7.0),  # 17.5, and 2 x 7/8 x the eighth of 4 GB that a GPU keeps
    ],
)
def test_the_bytes_of_a_window_by_hand(kind, gpus, micro_batches, gpu, machine):
    """Of 1e9 parameters, in GB."""
    sent = traffic(1e9, gpus, kind, micro_batches)
    assert (sent["gpu"] / 1e9, sent["machine"] / 1e9) == (gpu, machine)


def test_the_page_has_the_table_that_the_function_gives():
    assert traffic_table() in (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
