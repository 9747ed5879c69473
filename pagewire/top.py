"""`pagewire top`: the scheduler's state as it changes; a view on a terminal, else a line of figures for each state.

Several schedulers are shown in total, and each on a line of its own.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pagewire.access import OPEN, Access
from pagewire.errors import RequestError, Unavailable
from pagewire.introspection import in_a_line, introspection
from protos.pagewire.v1 import introspection_pb2 as pb

_TIMEOUT_S = 5.0
_RETRY_S = 1.0
# A server that has been away for longer than this is no longer watched.
_GIVE_UP_S = 60.0
_MAX_BAR_CELLS = 60
_HEADING_CELLS = 12


def run(target: str, interval_s: float, *, once: bool, console: Console, access: Access = OPEN) -> None:
    """Shows a server's state until Ctrl-C, or once.

    Raises:
        RequestError: it does not answer at first, or has been away for a minute, or refuses.
    """
    view = View(target, console)
    if once:
        with introspection(target, access) as stub:
            view.take(stub.GetState(pb.GetStateRequest(), timeout=_TIMEOUT_S, metadata=access.metadata))
        view.print()
        return
    try:
        answers = watch(target, interval_s, access=access)
        view.take(next(answers))  # which may raise, before the screen is touched
        if view.draws:
            with Live(view.picture(), console=console, auto_refresh=False) as live:
                for answer in answers:
                    view.take(answer)
                    live.update(view.picture(), refresh=True)
        else:
            view.print()
            for answer in answers:
                view.take(answer)
                view.print()
    except KeyboardInterrupt:
        return


def watch(
    target: str,
    interval_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    access: Access = OPEN,
) -> Iterator[pb.WatchStateResponse | Unavailable]:
    """States as they come, for ever; while a server that has answered is away, its error before each retry.

    Raises:
        RequestError: it was not there at first, has been away for a minute, or refuses.
    """
    request = pb.WatchStateRequest(interval_ms=round(interval_s * 1e3))
    answered_at: float | None = None
    while True:
        try:
            with introspection(target, access) as stub:
                for response in stub.WatchState(request, metadata=access.metadata):
                    answered_at = clock()
                    yield response
        except Unavailable as error:
            if answered_at is None or clock() - answered_at > _GIVE_UP_S:
                raise
            yield error
        sleep(_RETRY_S)


class View:
    """The latest state, and the rate of steps since the one before.

    Attributes:
        draws: whether `print` shows a picture, else lines.
    """

    def __init__(self, target: str, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.draws = console.is_terminal and not console.is_dumb_terminal
        self._target = target
        self._console = console
        self._clock = clock
        self._state = pb.SchedulerState()
        self._schedulers: Sequence[pb.NamedScheduler] = ()
        self._error: RequestError | None = None
        self._taken_at: float | None = None
        self._steps_per_s: float | None = None
        # By scheduler address.
        self._num_steps: Mapping[str, int] = {}

    def take(self, answer: pb.GetStateResponse | pb.WatchStateResponse | RequestError) -> None:
        """Takes the next state, or the error in its place, after which the picture keeps the state before."""
        if isinstance(answer, RequestError):
            self._error, self._taken_at, self._steps_per_s = answer, None, None
            return
        self._state, self._schedulers = answer.state, answer.schedulers
        named = {row.address: row.state.num_steps for row in answer.schedulers if row.HasField("state")}
        last, self._num_steps = self._num_steps, named or {"": answer.state.num_steps}
        now, before = self._clock(), self._taken_at
        # A scheduler that has come back, or was restarted, counts from the next state on.
        gains = [num - last[address] for address, num in self._num_steps.items() if num >= last.get(address, num + 1)]
        self._steps_per_s = None if before is None or not gains else sum(gains) / max(now - before, 1e-9)
        self._error, self._taken_at = None, now

    def print(self) -> None:
        """Writes the picture on a terminal, else the lines."""
        if self.draws:
            self._console.print(self.picture())
        else:
            self._console.print("\n".join(self.lines()), markup=False)

    def lines(self) -> list[str]:
        """All figures in one line, each after its name; then a line for each scheduler if there are several."""
        now = f"{datetime.now():%H:%M:%S}"
        if self._error is not None:
            return [f"{now} no answer: {self._error}"]
        state, pool = self._state, self._state.block_pool
        facts = {
            "serving": "yes" if state.serving else "no",
            "running": state.num_running,
            "waiting": state.num_waiting,
            "waiting_tokens": state.num_waiting_tokens,
            "swapped": state.num_swapped,
            "blocks": pool.num_total,
            "free": pool.num_free,
            "cached": pool.num_cached,
            "held": pool.num_held,
            "shared": pool.num_shared,
            "references": pool.num_references,
            "swap_blocks": pool.num_swap_total,
            "swap_free": pool.num_swap_free,
            "swap_outs": state.num_swap_outs,
            "swap_ins": state.num_swap_ins,
            "steps": state.num_steps,
            "steps_per_s": _figure(self._steps_per_s),
            "step_ms": f"{state.last_step_ms:.1f}",
            "step_tokens": state.last_step_tokens,
            "prefix_hits": _share(state.prefix_cache),
            "prefill_tokens_per_s": _figure(state.prefill_tokens_per_s or None),
            "swap_blocks_per_s": _figure(state.swap_blocks_per_s or None),
            "preemptions": state.num_preemptions,
        }
        figures = " ".join(f"{name}={value}" for name, value in facts.items())
        return [f"{now} {each}" for each in (figures, *map(in_a_line, self._schedulers))]

    def picture(self) -> Group:
        """The same as a picture: a bar for each pool, and sentences."""
        state, pool = self._state, self._state.block_pool
        width = max(8, min(_MAX_BAR_CELLS, self._console.width - _HEADING_CELLS))
        table = Table.grid(padding=(0, 2))
        prompts = f" ({state.num_waiting_tokens:,} prompt tokens)" if state.num_waiting else ""
        queues = f"{state.num_running} running, {state.num_waiting} waiting{prompts}, {state.num_swapped} swapped out"
        table.add_row("requests", queues)
        parts = _block_parts(pool)
        table.add_row("blocks", _bar([(count, glyph, style) for count, _, glyph, style in parts], width))
        table.add_row("", _legend(parts))
        unshared = f"; {pool.num_references:,} without sharing" if pool.num_references > pool.num_held else ""
        table.add_row("", f"{pool.num_held:,} of {pool.num_total:,} held{unshared}")
        if pool.num_swap_total:
            used = pool.num_swap_total - pool.num_swap_free
            table.add_row("swap", _bar([(used, "▓", "blue"), (pool.num_swap_free, "░", "dim")], width))
            moved = f"{state.num_swap_outs:,} requests out and {state.num_swap_ins:,} in so far"
            table.add_row("", f"{used:,} of {pool.num_swap_total:,} blocks in CPU memory; {moved}")
        last = f"the last took {state.last_step_ms:.1f} ms for {state.last_step_tokens:,} tokens"
        table.add_row("steps", f"{_figure(self._steps_per_s)}/s; {last}; {state.num_steps:,} so far")
        looked_up = f"{state.prefix_cache.num_looked_up_tokens:,}"
        table.add_row("prefix", f"{_share(state.prefix_cache)} of {looked_up} prompt tokens found cached")
        prefill, swap = _figure(state.prefill_tokens_per_s or None), _figure(state.swap_blocks_per_s or None)
        table.add_row("rates", f"{prefill} prompt tokens/s, {swap} swapped blocks/s")
        table.add_row("preempted", f"{state.num_preemptions:,} so far")
        for place, each in enumerate(self._schedulers):
            table.add_row("schedulers" if place == 0 else "", Text(in_a_line(each)))
        return Group(self._headline(), table)

    def _headline(self) -> Text:
        if self._error is not None:
            return Text.assemble((self._target, "bold"), "  ", (f"no answer, trying again: {self._error}", "red"))
        health = ("serving", "green") if self._state.serving else ("no worker, nothing runs", "red")
        return Text.assemble((self._target, "bold"), "  ", health, f"  {datetime.now():%H:%M:%S}")


def cells(counts: Sequence[int], width: int) -> list[int]:
    """A bar's `width` cells shared out in proportion, with at least one for each count over zero."""
    total = sum(counts)
    if total == 0:
        return [0] * len(counts)
    shares = [count * width / total for count in counts]
    sizes = [max(1, int(share)) if share else 0 for share in shares]
    places = range(len(counts))
    while sum(sizes) < width:
        sizes[max(places, key=lambda place: shares[place] - sizes[place])] += 1
    while sum(sizes) > width:
        sizes[max(places, key=sizes.__getitem__)] -= 1
    return sizes


def _block_parts(pool: pb.BlockPool) -> list[tuple[int, str, str, str]]:
    """How many blocks, what they are, and how a bar shows them; the glyphs tell them apart without colour too."""
    return [
        (pool.num_shared, "shared", "█", "magenta"),
        (pool.num_held - pool.num_shared, "held by one", "▓", "blue"),
        (pool.num_cached, "cached", "▒", "yellow"),
        (pool.num_free, "free", "░", "dim"),
    ]


def _bar(parts: Sequence[tuple[int, str, str]], width: int) -> Text:
    sizes = cells([count for count, _, _ in parts], width)
    return Text.assemble(*((glyph * size, style) for (_, glyph, style), size in zip(parts, sizes, strict=True)))


def _legend(parts: Sequence[tuple[int, str, str, str]]) -> Text:
    return Text("  ").join(Text.assemble((glyph, style), f" {count:,} {name}") for count, name, glyph, style in parts)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _share(cache: pb.PrefixCache) -> str:
    looked_up = cache.num_looked_up_tokens
    return f"{cache.num_found_tokens / looked_up:.0%}" if looked_up else "-"
