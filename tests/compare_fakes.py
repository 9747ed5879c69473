"""Engines that answer by arithmetic, in this process and as drivers of their own, for tests of the comparison."""

import functools
import json
import os
import sys
from pathlib import Path

from bench.compare.engine import Command, EngineError
from bench.compare.rounds import Comparison, Run
from bench.compare.variants import Variant

SMALL = {
    "w1": [[{"ids": [1, 2, 3], "max_tokens": 3, "gap": 0.0}]],
    "w2": [[{"ids": [4, 5], "max_tokens": 2, "gap": 0.0}] * 2],
    "w4": [[{"ids": [6, 7], "max_tokens": 3, "gap": 1.0}] * 3],
    "warm": [[{"ids": [8], "max_tokens": 1, "gap": 0.0}] * 2],
}
OTHER = "other"
# Fakes have nothing to rest from.
RestlessComparison = functools.partial(Comparison, settle_s=0.0, start_s=0.0)
# Speaks the line protocol in figures that it is told, and computes nothing. "child" starts a process that outlives it.
FAKE_DRIVER = """
import json, os, subprocess, sys, time
options = json.loads(sys.argv[2])
print("a word of its own", file=sys.stderr)
if options.get("dies"):
    sys.exit(3)
pids = [os.getpid()]
if options.get("child"):
    child = subprocess.Popen(["tail", "-f", __file__], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    # It runs its own program, and has the memory of one, once it has printed something.
    child.stdout.readline()
    pids = [child.pid]
print(json.dumps({"version": sys.argv[1], "pids": pids, "started_at": time.monotonic()}), flush=True)
for number, line in enumerate(sys.stdin):
    requests = json.loads(line)["requests"]
    if number == options.get("fails_at"):
        print(json.dumps({"error": "out of luck"}), flush=True)
        continue
    if number == options.get("sleeps_at"):
        time.sleep(600)
    spans = [r["max_tokens"] - options.get("short", 0) for r in requests]
    times = [[r["at"] + options["ttft"] + i * options["tpot"] for i in range(n)] for r, n in zip(requests, spans)]
    print(json.dumps({"times": times, "tokens": [[7] * n for n in spans]}), flush=True)
"""


class FakeEngine:
    """Answers at once with times by arithmetic: a token takes longer, the more requests arrive in a second."""

    def __init__(self, name: str, log: list, *, capacity: float = 10.0, fails_in: tuple[str, ...] = ()) -> None:
        self.version, self.first_answer_s = "1", None
        self.awake = True
        self._name, self._log, self._capacity, self._fails_in = name, log, capacity, fails_in
        log.append(("start", name))

    def play(self, rows):
        stamp, body = rows[0].token_ids[0], tuple(tuple(row.token_ids[1:]) for row in rows)
        assert all(row.token_ids[0] == stamp for row in rows)
        assert self.awake
        self._log.append(("play", self._name, body, stamp))
        if self._name in self._fails_in and len(rows) == 2 and body[0]:
            raise EngineError("out of luck")
        gap = rows[-1].at - rows[0].at
        rate = (len(rows) - 1) / gap if gap else 1.0
        tpot = 0.05 * rate / self._capacity
        for row in rows:
            row.times = [row.at + 0.1 + i * tpot for i in range(row.max_tokens)]
            row.output = [9] * row.max_tokens
        self.first_answer_s = self.first_answer_s or 2.5
        return 0.25

    def pause(self):
        self.awake = False

    def resume(self):
        self.awake = True

    def peak_memory_bytes(self):
        return 3_000_000

    def close(self):
        self._log.append(("close", self._name))


def variant(name: str, peer: str = OTHER, **changes) -> Variant:
    return Variant(name, peer, **changes)


def command(tmp_path: Path, version: str = "7", run_within_s: float = 60.0, **options) -> Command:
    driver = tmp_path / "driver.py"
    driver.write_text(FAKE_DRIVER)
    options = {"ttft": 0.5, "tpot": 0.25} | options
    arguments = (sys.executable, str(driver), version, json.dumps(options))
    return Command(arguments, os.environ, tmp_path / "logs" / "driver.log", run_within_s=run_within_s)


def run_of(engine: str, number: int, test: str, rate: float | None = None, **figures: float) -> Run:
    return Run(number, engine, test, rate, False, dict.fromkeys(("out_tok_s", "tpot_p50_ms")) | figures, 0.0, [7])
