"""The picture of `bench.kv_memory`: what memory holds, and what sharing saves, as in the paper's figures 2 and 15."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.kv_memory import MemoryRow, SharingRow

_CATEGORIES = (
    ("used", "token states", "#4c78a8"),
    ("reservation", "reservation", "#f2b134"),
    ("internal", "internal fragmentation", "#e4572e"),
    ("external", "external fragmentation & others", "#c8c8c8"),
)


def draw(memory: Sequence["MemoryRow"], sharing: Sequence["SharingRow"], path: Path) -> None:
    """Writes an SVG or PNG, by the path's suffix: a panel for each data set, and one for sharing.

    Raises:
        ModuleNotFoundError: there is no matplotlib; the `bench` extra has it.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "pagewire"  # the same figures, the same file
    mpl.rcParams["svg.fonttype"] = "none"  # text as text: a third of the size
    from matplotlib import pyplot

    datasets = list(dict.fromkeys(row.dataset for row in memory))
    figure, panels = pyplot.subplots(1, len(datasets) + 1, figsize=(5.2 * (len(datasets) + 1), 4.2))
    for panel, dataset in zip(panels, datasets, strict=False):
        rows = [row for row in memory if row.dataset == dataset and row.shown]
        _draw_memory(panel, rows)
        panel.set_title(f"KV slots, {dataset}")
    _draw_sharing(panels[-1], sharing)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    handles, labels = panels[0].get_legend_handles_labels()
    middle = len(datasets) / (len(datasets) + 1) / 2
    figure.legend(handles, labels, fontsize=8, ncols=len(labels), loc="lower center", bbox_to_anchor=(middle, 0))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _draw_memory(panel: Any, rows: Sequence["MemoryRow"]) -> None:
    names = [row.name.replace(" (", "\n(") for row in rows]
    bottoms = [0.0] * len(rows)
    for attribute, label, colour in _CATEGORIES:
        values = [100 * getattr(row.shares, attribute) for row in rows]
        bars = panel.bar(names, values, bottom=bottoms, color=colour, label=label, width=0.7)
        texts = [f"{value:.1f}" if value >= 4 else "" for value in values]
        panel.bar_label(bars, labels=texts, label_type="center", fontsize=8)
        bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
    for place, row in enumerate(rows):
        panel.text(place, 101.5, f"{row.shares.num_running:.1f} running", ha="center", fontsize=8)
    panel.set_ylim(0, 108)
    panel.set_ylabel("% of the pool")
    panel.tick_params(axis="x", labelsize=8)


def _draw_sharing(panel: Any, rows: Sequence["SharingRow"]) -> None:
    rows = [row for row in rows if row.candidates in ("", "measured")]
    methods = list(dict.fromkeys(row.method for row in rows))
    datasets = list(dict.fromkeys(row.dataset for row in rows))
    width = 0.8 / len(datasets)
    for place, dataset in enumerate(datasets):
        saved = {row.method: 100 * row.saved for row in rows if row.dataset == dataset}
        values = [saved[method] for method in methods]
        spots = [index + (place - (len(datasets) - 1) / 2) * width for index in range(len(methods))]
        bars = panel.bar(spots, values, width, label=dataset, color=("#4c78a8", "#f2b134")[place % 2])
        panel.bar_label(bars, labels=[f"{value:.1f}" for value in values], fontsize=8)
    panel.set_xticks(range(len(methods)), [method.replace(" ", "\n", 1) for method in methods])
    panel.tick_params(axis="x", labelsize=8)
    panel.set_ylabel("% of blocks saved")
    panel.set_title("blocks saved by sharing")
    panel.legend(fontsize=8)
