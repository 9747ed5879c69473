"""How `pagewire generate` shows log-probabilities: a line per token, with its rank and the most probable tokens."""

from collections.abc import Callable, Iterator, Sequence

from pagewire.results import Completion, TokenLogprobs


def lines(completion: Completion, text_of: Callable[[int], str]) -> Iterator[str]:
    """The prompt's tokens, then those of each sequence.

    Args:
        completion: the answer.
        text_of: returns the text of a token; called once for each token id.
    """
    texts: dict[int, str] = {}

    def shown(token_id: int) -> str:
        if token_id not in texts:
            texts[token_id] = text_of(token_id)
        return repr(texts[token_id])

    if completion.prompt_logprobs:
        yield "--- log-probabilities of the prompt ---"
        yield from _lines(completion.prompt_logprobs, shown)
    for output in completion.outputs:
        if output.logprobs:
            yield f"--- log-probabilities of {output.index} ---"
            yield from _lines(output.logprobs, shown)


def _lines(logprobs: Sequence[TokenLogprobs], shown: Callable[[int], str]) -> Iterator[str]:
    for token in logprobs:
        beside = "  ".join(f"{shown(top.token_id)} {top.logprob:.3f}" for top in token.top)
        yield f"{shown(token.token_id):<16} {token.logprob:8.3f}  rank {token.rank:<5}  {beside}".rstrip()
