"""Requests to replay: lengths like those of ShareGPT and Alpaca, with Poisson arrivals in simulated time.

The data sets themselves cannot be had here, so lengths are drawn, with a fixed seed, from log-normal distributions
whose means are those that the PagedAttention paper reports (Kwon et al., SOSP'23, section 6.1 and figure 11): ShareGPT
161.31 input and 337.99 output tokens, Alpaca 19.31 and 58.45. Each length is clipped to 1 .. 1,024, so that no request
is longer than the 2,048 tokens of the paper's models; the location parameter is chosen so that the mean *after*
clipping is the stated one. The paper gives no spread; the sigmas here are ours, read off the shapes of its figure 11:
long-tailed inputs and broad outputs for ShareGPT, short inputs for Alpaca. Input and output of a request are drawn
independently.
"""

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

# The context length of the paper's OPT models.
MAX_TOKENS = 2048
_MAX_LENGTH = MAX_TOKENS // 2


@dataclass(frozen=True, slots=True)
class Lengths:
    """A clipped log-normal distribution of lengths, in tokens.

    Attributes:
        mean: after clipping.
        sigma: standard deviation of the logarithm, before clipping.
    """

    mean: float
    sigma: float

    def location(self) -> float:
        """The mean of the logarithm that gives `mean`, by bisection."""
        low, high = 0.0, math.log(_MAX_LENGTH)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _clipped_mean(middle, self.sigma) < self.mean else (low, middle)
        return low

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """`count` lengths."""
        location = self.location()
        return [max(1, min(_MAX_LENGTH, round(rng.lognormvariate(location, self.sigma)))) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Dataset:
    """What a trace is drawn from.

    Attributes:
        rate: requests a second, so many that they queue up for a pool of 15,680 slots whose steps take 25 ms.
    """

    name: str
    input: Lengths
    output: Lengths
    rate: float


SHAREGPT = Dataset("ShareGPT-like", Lengths(161.31, 1.3), Lengths(337.99, 0.9), rate=6.0)
ALPACA = Dataset("Alpaca-like", Lengths(19.31, 0.6), Lengths(58.45, 1.0), rate=400.0)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_s: in simulated time.
        num_output_tokens: after which it ends; only the oracle knows this beforehand.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int


def make(dataset: Dataset, num_requests: int, rate: float | None = None, seed: int = 0) -> list[TraceRequest]:
    """`num_requests` requests in order of arrival, `rate` (default: the data set's) of them a second on average."""
    rng = random.Random(seed)
    inputs = dataset.input.draw(rng, num_requests)
    outputs = dataset.output.draw(rng, num_requests)
    now = 0.0
    requests = []
    for num_prompt_tokens, num_output_tokens in zip(inputs, outputs, strict=True):
        now += rng.expovariate(rate or dataset.rate)
        requests.append(TraceRequest(now, num_prompt_tokens, num_output_tokens))
    return requests


def _clipped_mean(location: float, sigma: float) -> float:
    """E[min(X, limit)] of a log-normal X."""
    normal = NormalDist()
    border = (math.log(_MAX_LENGTH) - location) / sigma
    below = math.exp(location + sigma * sigma / 2) * normal.cdf(border - sigma)
    return below + _MAX_LENGTH * (1 - normal.cdf(border))
