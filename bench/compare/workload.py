"""The prompts that all engines get, as token ids: made from a text that ships with Python, the same ones each time.

`python -m bench.compare.workload MODEL_FOLDER OUT.json` writes them for `pagewire bench`, whose form they have.
"""

import argparse
import json
import math
import random
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tokenizers import Tokenizer

from bench import machine
from pagewire.bench import BenchError, Record, Workload, records

NAMES = ("w1", "w2", "w3", "w4")
VARIANTS = 3
_SEED = 20240607
# The first token of every prompt is replaced by one that no other run of the comparison has.
_FIRST_STAMP = 1000
_Request = dict[str, Any]


def make(model: Path) -> Workload:
    """w1 one stream, w2 32 at once, w3 32 that share a prefix, w4 64 with random arrivals, and a warm-up.

    Args:
        model: a checkpoint's folder; its tokenizer cuts the text.

    Raises:
        BenchError: there is no tokenizer.
    """
    return _Maker(model).make()


def stamped(workload: Workload, test: str, rate: float, repetition: int, stamp: int) -> list[Record]:
    """The requests of one run; their first token tells them from all other runs', so that no prefix cache helps.

    Args:
        workload: from `make`.
        test: its name in the workload.
        rate: requests a second, for w4.
        repetition: which variant.
        stamp: the number of the run, the same for all engines that are compared in it.
    """
    rows = records(workload, test, rate, repetition)
    for row in rows:
        row.token_ids = [_FIRST_STAMP + stamp, *row.token_ids[1:]]
    return rows


class _Maker:
    """Draws pieces of the text; no two begin in the same stretch of 32 tokens."""

    def __init__(self, model: Path) -> None:
        file = model / "tokenizer.json"
        if not file.is_file():
            raise BenchError(f"{model} is no checkpoint's folder: it has no {file.name}")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._rng = random.Random(_SEED)
        text = "\n\n".join(topics[name] for name in sorted(topics))
        self._corpus = self._encode(" ".join(text.split()))
        self._used: set[int] = set()

    def make(self) -> Workload:
        rng = self._rng
        w2 = [rng.randint(64, 256) for _ in range(32)]
        # Gaps are of unit rate: a run divides them by its own.
        w4 = [
            (self._length(170, 0.8, 16, 1024), self._length(125, 0.7, 8, 512), rng.expovariate(1.0)) for _ in range(64)
        ]
        return {
            "w1": [[_request(self._cut(128), 128)] for _ in range(VARIANTS)],
            "w2": [[_request(self._cut(length), 128) for length in w2] for _ in range(VARIANTS)],
            "w3": [self._sharing(count=32, prefix=512, tail=32, output=64) for _ in range(VARIANTS)],
            "w4": [[_request(self._cut(length), output, gap) for length, output, gap in w4] for _ in range(VARIANTS)],
            "warm": [[_request(self._cut(length), 16) for length in (40, 130, 200, 90)]],
        }

    def _cut(self, length: int) -> list[int]:
        while True:
            start = self._rng.randrange(0, len(self._corpus) - length)
            ids = self._corpus[start : start + length]
            if start // 32 not in self._used and self._is_text(ids):
                self._used.add(start // 32)
                return ids

    def _sharing(self, count: int, prefix: int, tail: int, output: int) -> list[_Request]:
        while True:
            head = self._cut(prefix)
            prompts = [head + self._cut(tail) for _ in range(count)]
            if all(self._is_text(prompt) for prompt in prompts):
                return [_request(prompt, output) for prompt in prompts]

    def _length(self, mean: float, sigma: float, least: int, most: int) -> int:
        drawn = self._rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
        return max(least, min(most, round(drawn)))

    def _is_text(self, ids: list[int]) -> bool:
        """Whether engines that are given the text see the same tokens."""
        return self._encode(self._tokenizer.decode(ids, skip_special_tokens=False)) == ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _request(ids: list[int], max_tokens: int, gap: float = 0.0) -> _Request:
    return {"ids": ids, "max_tokens": max_tokens, "gap": gap}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare.workload", description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="a checkpoint's folder")
    parser.add_argument("out", type=machine.output_file, help="JSON file to write")
    arguments = parser.parse_args()
    try:
        arguments.out.write_text(json.dumps(make(arguments.model)))
    except BenchError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
