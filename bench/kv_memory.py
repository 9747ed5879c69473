"""`python -m bench.kv_memory`: what share of the allocated KV slots holds tokens, and how many blocks sharing saves.

Replays a trace with lengths like ShareGPT's and one with lengths like Alpaca's (`trace.py`) through the scheduler core
(`paged.py`), and through the contiguous reservations that the PagedAttention paper compares with (`contiguous.py`), on
the same pool: 15,680 slots, about what a 40 GB A100 has left beside a 13B model (table 1 of the paper). All averages
are over the steps in which a request had to wait, so while memory is what holds requests up.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench import machine, trace
from bench.candidates import MEASURED, SURE, UNSURE, CandidateModel
from bench.contiguous import Allocator, BuddyAllocator, FirstFitAllocator, Reservation, Shares
from bench.contiguous import replay as replay_contiguous
from bench.paged import Decoding, Pool, Replay
from bench.trace import ALPACA, SHAREGPT, Dataset

BLOCK_SIZES = (8, 16, 32, 64)
DEFAULT_BLOCK_SIZE = 16
# Requests of each trace: for memory, and for sharing, whose groups are larger.
_NUM_REQUESTS = {SHAREGPT.name: (1000, 200), ALPACA.name: (4000, 1000)}
_ALLOCATORS: tuple[tuple[str, Callable[[int], Allocator]], ...] = (
    ("buddy", BuddyAllocator),
    ("first fit", FirstFitAllocator),
)
# Token states of figure 2, in % of the pool, and the savings of figure 15 for 2, 4 and 6 sequences.
_PAPER_USED = {"Orca (Max)": 20.4, "Orca (Pow2)": 26.8, "Orca (Oracle)": 38.2, "vLLM": 96.3}
_PAPER_SAVED = {
    "parallel": {ALPACA.name: "6.1-9.8", SHAREGPT.name: "16.2-30.5"},
    "beam": {ALPACA.name: "37.6-55.2", SHAREGPT.name: "44.3-66.3"},
}


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One way to keep the KV of one trace.

    Attributes:
        allocator: of contiguous memory; empty for blocks.
        block_size: 0 for contiguous memory.
        shares: of the pool's slots.
        used_of_allocated: used slots / slots that are reserved, or in blocks of a table.
        cached: share of the pool in blocks that no request holds, kept for their content.
        shown: whether it is in the picture.
    """

    dataset: str
    name: str
    allocator: str
    block_size: int
    prefix_caching: bool
    shares: Shares
    used_of_allocated: float
    cached: float
    num_preemptions: int
    shown: bool


@dataclass(frozen=True, slots=True)
class SharingRow:
    """Blocks saved by one decoding method: 1 - blocks held / entries of all block tables.

    Attributes:
        candidates: the model of a beam search's candidates; empty for sampling.
        num_running: requests that hold blocks.
    """

    dataset: str
    method: str
    candidates: str
    saved: float
    num_running: float
    num_preemptions: int


def contiguous_rows(dataset: Dataset, requests: list[trace.TraceRequest], pool: Pool) -> list[MemoryRow]:
    """The three versions of Orca, with both allocators."""
    rows = []
    for allocator, make in _ALLOCATORS:
        for reservation in Reservation:
            shares = replay_contiguous(
                requests,
                reservation,
                make(pool.num_slots),
                num_slots=pool.num_slots,
                max_num_seqs=pool.max_num_seqs,
                step_s=pool.step_s,
            )
            used = shares.used / max(1e-9, 1 - shares.external)
            shown = allocator == "buddy"
            rows.append(MemoryRow(dataset.name, reservation.value, allocator, 0, False, shares, used, 0.0, 0, shown))
    return rows


def paged_row(
    dataset: Dataset, requests: list[trace.TraceRequest], pool: Pool, on_finished: Callable[[], None] | None = None
) -> MemoryRow:
    """Pagewire's blocks."""
    replayed = Replay(requests, pool, on_finished=on_finished).run()
    assert replayed.num_finished == len(requests)
    return MemoryRow(
        dataset=dataset.name,
        name="Pagewire",
        allocator="",
        block_size=pool.block_size,
        prefix_caching=pool.prefix_caching,
        shares=replayed.shares,
        used_of_allocated=replayed.used_of_allocated,
        cached=replayed.cached,
        num_preemptions=replayed.num_preemptions,
        shown=pool.block_size == DEFAULT_BLOCK_SIZE and pool.prefix_caching,
    )


def sharing_row(
    dataset: Dataset,
    requests: list[trace.TraceRequest],
    decoding: Decoding,
    candidates: str = "",
    on_finished: Callable[[], None] | None = None,
) -> SharingRow:
    """Blocks saved by `decoding`."""
    replayed = Replay(requests, Pool(), decoding, on_finished).run()
    assert replayed.num_finished == len(requests)
    method = f"beam width {decoding.beam_width}" if decoding.beam_width else f"parallel n={decoding.n}"
    running = replayed.shares.num_running
    return SharingRow(dataset.name, method, candidates, replayed.saved_by_sharing, running, replayed.num_preemptions)


def sharing_cases() -> list[tuple[Decoding, str]]:
    """Parallel sampling and beam search with 2, 4 and 6 sequences, the search of 4 with other candidates too."""
    models: list[tuple[str, CandidateModel]] = [("measured", MEASURED), ("unsure", UNSURE), ("sure", SURE)]
    cases = [(Decoding(n=n), "") for n in (2, 4, 6)]
    cases += [(Decoding(beam_width=width), "measured") for width in (2, 4, 6)]
    return cases + [(Decoding(beam_width=4, candidates=model), name) for name, model in models[1:]]


def run(scale: float, console: Console) -> tuple[list[MemoryRow], list[SharingRow]]:
    """All replays, with progress by requests."""
    pools = [Pool(block_size=block_size) for block_size in BLOCK_SIZES] + [Pool(prefix_caching=False)]
    memory: list[MemoryRow] = []
    sharing: list[SharingRow] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("")
        for dataset in (SHAREGPT, ALPACA):
            for_memory, for_sharing = (
                trace.make(dataset, max(1, int(count * scale))) for count in _NUM_REQUESTS[dataset.name]
            )
            memory += contiguous_rows(dataset, for_memory, Pool())
            for pool in pools:
                progress.reset(task, description=f"{dataset.name}, blocks of {pool.block_size}", total=len(for_memory))
                memory.append(paged_row(dataset, for_memory, pool, lambda: progress.advance(task)))
            for decoding, name in sharing_cases():
                progress.reset(task, description=f"{dataset.name}, {decoding}", total=len(for_sharing))
                row = sharing_row(dataset, for_sharing, decoding, name, lambda: progress.advance(task))
                sharing.append(row)
    return memory, sharing


def memory_table(rows: list[MemoryRow]) -> Table:
    """Shares in %; none where no request had to wait."""
    table = Table(title="KV slots, % of the pool, while requests wait", title_justify="left", box=None, pad_edge=False)
    for heading in ("trace", "memory", "allocator / block size"):
        table.add_column(heading)
    headings = ("tokens", "reservation", "internal", "external & others", "tokens of allocated", "running", "preempted")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        shares = row.shares
        kind = row.allocator or f"{row.block_size}{'' if row.prefix_caching else ', no prefix cache'}"
        parts = (shares.used, shares.reservation, shares.internal, shares.external, row.used_of_allocated)
        cells = [*(f"{100 * part:.1f}" for part in parts), f"{shares.num_running:.1f}"]
        cells = cells if shares.num_steps else ["-"] * len(cells)
        table.add_row(row.dataset, row.name, kind, *cells, str(row.num_preemptions))
    return table


def sharing_table(rows: list[SharingRow]) -> Table:
    """Savings in %; none where no request had to wait."""
    table = Table(title="Blocks saved by sharing, %", title_justify="left", box=None, pad_edge=False)
    for heading in ("trace", "method", "candidates"):
        table.add_column(heading)
    for heading in ("saved", "paper, n = 2-6", "running", "preempted"):
        table.add_column(heading, justify="right")
    for row in rows:
        paper = _PAPER_SAVED[row.method.split()[0]][row.dataset]
        saved, running = (f"{100 * row.saved:.1f}", f"{row.num_running:.1f}") if row.num_running else ("-", "-")
        table.add_row(row.dataset, row.method, row.candidates, saved, paper, running, str(row.num_preemptions))
    return table


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the number of requests (default 1: about a minute)"
    )
    parser.add_argument("--json", type=machine.output_file, help="file to write all figures to")
    parser.add_argument("--figure", type=machine.picture_file, help="SVG or PNG to draw; needs the bench extra")
    arguments = parser.parse_args()
    if not 0 < arguments.scale < math.inf:
        parser.error("--scale must be greater than 0")
    console = Console(width=machine.columns())
    memory, sharing = run(arguments.scale, console)
    console.print(memory_table(memory))
    console.print()
    console.print(sharing_table(sharing))
    if arguments.json is not None:
        report = machine.facts(["pagewire"]) | {
            "pool": dataclasses.asdict(Pool()),
            "traces": {dataset.name: dataclasses.asdict(dataset) for dataset in (SHAREGPT, ALPACA)},
            "scale": arguments.scale,
            "memory": [dataclasses.asdict(row) for row in memory],
            "sharing": [dataclasses.asdict(row) for row in sharing],
            "paper": {"used": _PAPER_USED, "saved": _PAPER_SAVED},
        }
        machine.write(arguments.json, report)
    if arguments.figure is not None:
        from bench.figure import draw

        draw(memory, sharing, arguments.figure)


if __name__ == "__main__":
    machine.run(main)
