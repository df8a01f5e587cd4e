"""Small pictures of what several sides reach, a line for each seed."""

from typing import Any

from compare import ROOT

# To be read on white and on black: the background is that of the page.
COLOURS = ["#2f81d0", "#d9722e", "#8a8a8a"]
TEXT = "#7d8590"
COLOURED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
Curve = list[list[float]]  # [x, y]


def draw(
    name: str, title: str, xlabel: str, ylabel: str, curves: dict[str, list[Curve]], **settings: Any
) -> None:
    """docs/{name}.png. curves: those of each side, one for each seed. settings: of matplotlib's axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(dict.fromkeys(COLOURED, TEXT))
    figure, panel = plt.subplots(figsize=(4.4, 2.9))
    for colour, (side, of_seeds) in zip(COLOURS, curves.items(), strict=False):
        for seed, curve in enumerate(of_seeds):
            label = side if seed == 0 else None
            panel.plot(
                *zip(*curve, strict=True),
                ".-",
                color=colour,
                linewidth=1,
                markersize=3,
                alpha=0.8,
                label=label,
            )
    panel.set(title=title, xlabel=xlabel, ylabel=ylabel, **settings)
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / f"{name}.png", dpi=150, transparent=True)
