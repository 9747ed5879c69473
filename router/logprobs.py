"""Log-probabilities as clients see them, made from the columns in which they come from the scheduler."""

import asyncio
from collections.abc import Sequence

from protos.logprobs import Logprobs
from protos.pagewire.v1 import generation_pb2 as pb

# Tokens of a prompt that are converted at a time; in between, other streams go on.
_TOKENS_AT_ONCE = 256


def token_logprobs(token_id: int, logprobs: Logprobs, place: int) -> pb.TokenLogprobs:
    """The log-probabilities of the token at `place` in the columns."""
    tops = slice(place * logprobs.num_top, (place + 1) * logprobs.num_top)
    pairs = zip(logprobs.top_token_ids[tops], logprobs.top_logprobs[tops], strict=True)
    return pb.TokenLogprobs(
        logprob=logprobs.logprobs[place],
        top=[pb.TokenLogprob(token_id=top_id, logprob=logprob) for top_id, logprob in pairs],
        rank=logprobs.ranks[place],
        token_id=token_id,
    )


async def of_prompt(prompt_token_ids: Sequence[int], logprobs: Logprobs) -> list[pb.TokenLogprobs]:
    """The log-probabilities of all tokens of a prompt but the first."""
    messages: list[pb.TokenLogprobs] = []
    for place in range(len(logprobs)):
        messages.append(token_logprobs(prompt_token_ids[place + 1], logprobs, place))
        if len(messages) % _TOKENS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return messages
