"""benchmarks/scale.py: bytes of a window by hand, and its simulation on few chats."""

from pathlib import Path

import pytest

from benchmarks.scale import traffic, traffic_table

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "kind, gpus, micro_batches, gpu, machine",
    [
        ("ddp", 8, 16, 7.0, 0),  # 2 x 7/8 x 4 GB of gradients: the last micro-batch alone synchronises
        ("ddp", 64, 1, 7.875, 7.875),  # 2 x 63/64 x 4
        ("fsdp2", 8, 4, 17.5, 0),  # 7/8 x (4 x (2 forward + 2 backward) + 4 GB of gradients)
        ("fsdp2 without reshard", 8, 1, 5.25, 0),  # 7/8 x (2 + 4)
        ("hsdp", 8, 1, 7.0, 0),  # one machine: as fsdp2
        ("hsdp", 64, 1, 7.875, 7.0),  # as in one machine, and 2 x 7/8 x the eighth of 4 GB that a GPU keeps
        ("hsdp", 64, 4, 18.375, 7.0),  # 17.5 + 0.875
        ("fsdp2", 1, 1, 0, 0),
    ],
)
def test_the_bytes_of_a_window_by_hand(kind, gpus, micro_batches, gpu, machine):
    """Of 1e9 parameters, in GB."""
    sent = traffic(1e9, gpus, kind, micro_batches)
    assert (sent["gpu"] / 1e9, sent["machine"] / 1e9) == (gpu, machine)


def test_the_page_has_the_table_that_the_function_gives():
    assert traffic_table() in (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="kind 'zero3': one of ddp"):
        traffic(1e9, 8, "zero3")
