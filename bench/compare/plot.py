"""The picture of the comparison: throughput against latency of w4, at all rates that were played."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from bench.compare.rounds import TPOT_LIMIT_MS, Run

_PANELS = (("tpot_p50_ms", "TPOT p50, ms"), ("ttft_p99_ms", "TTFT p99, ms"))
# Ours first. When the colours are used up, they are repeated with the next line style and marker.
_COLOURS = ("#d62728", "#4c78a8", "#f2b134", "#54a24b", "#b279a2", "#9d755d")
_LINES = ("o-", "s--", "^:")


def points(runs: Sequence[Run], engine: str, metric: str) -> list[tuple[float, float, float]]:
    """(rate, output tokens a second, latency) of an engine, by rate; medians where a rate was played several times."""
    by_rate: dict[float, list[tuple[float, float]]] = {}
    for run in runs:
        throughput, latency = run.metrics["out_tok_s"], run.metrics[metric]
        if run.engine == engine and run.rate is not None and throughput is not None and latency is not None:
            by_rate.setdefault(run.rate, []).append((throughput, latency))
    return [
        (rate, statistics.median(x for x, _ in found), statistics.median(y for _, y in found))
        for rate, found in sorted(by_rate.items())
    ]


def draw(runs: Sequence[Run], path: Path) -> None:
    """Writes an SVG or PNG, by the path's suffix.

    Raises:
        ModuleNotFoundError: there is no matplotlib; the `bench` extra has it.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "pagewire"  # the same figures, the same file
    mpl.rcParams["svg.fonttype"] = "none"  # text as text: a third of the size
    from matplotlib import pyplot
    from matplotlib.ticker import StrMethodFormatter

    engines = list(dict.fromkeys(run.engine for run in runs if run.rate is not None))
    styles = list(itertools.product(_LINES, _COLOURS))
    figure, panels = pyplot.subplots(1, len(_PANELS), figsize=(11, 5.2), layout="constrained")
    for panel, (metric, label) in zip(panels, _PANELS, strict=True):
        for engine, (line, colour) in zip(engines, itertools.cycle(styles), strict=False):
            rates, throughputs, latencies = zip(*points(runs, engine, metric), strict=True)
            panel.plot(throughputs, latencies, line, label=engine, color=colour, markersize=4, linewidth=1.2)
            for rate, x, y in zip(rates, throughputs, latencies, strict=True):
                panel.annotate(f"{rate:g}", (x, y), (3, 3), textcoords="offset points", fontsize=7, color=colour)
        panel.set_yscale("log")
        for axis_format in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
            axis_format(StrMethodFormatter("{x:g}"))
        panel.tick_params(axis="y", which="both", labelsize=8)
        panel.set_xlabel("output tokens/s")
        panel.set_ylabel(label)
        panel.grid(alpha=0.3, which="both")
    panels[0].axhline(TPOT_LIMIT_MS, color="grey", linestyle=":", linewidth=1)
    if engines:
        figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=5)
    figure.suptitle("w4: Poisson arrivals, in an open loop; beside each point its requests a second", fontsize=10)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
