"""Token ids of one sequence to text as they come: whole characters, and nothing that a stop string may yet claim."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# A character has at most four bytes, so tokens that make none of so many are no character at all.
_MAX_PENDING_TOKENS = 16
# Prompt tokens that the first output token is decoded behind: a leading space, or a character begun in the prompt.
_NUM_PROMPT_TOKENS = 8


class Detokenizer:
    """Text of a growing sequence.

    Args:
        tokenizer: the model's.
        prompt_token_ids: what the sequence continues.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        tail = list(prompt_token_ids[-_NUM_PROMPT_TOKENS:])
        border = _last_border(tokenizer, tail)
        self._restart(tail[:border])
        # A character that the prompt has begun belongs to the output; the library, told of it as prompt, would repeat
        # the prompt's text with it. What is there of it looks like a U+FFFD of the prompt's own, which does not belong
        # to the output: if the next token leaves it one, it was.
        self._prompt_rest = ""
        for token_id in tail[border:]:
            self.push(token_id)
        self._prompt_rest = tokenizer.decode(tail[border:])

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # the one type it has: the text before the token changed with it, so begin anew behind it
            self._restart(())
            text = self._stream.step(self._tokenizer, token_id)
        if text is None and not self._tokenizer.decode(self._pending):
            self._pending.clear()  # special tokens, which have no text
        if text is None and len(self._pending) >= _MAX_PENDING_TOKENS:
            text = self._tokenizer.decode(self._pending)
            self._restart(self._pending)
        if text is None:
            return ""
        self._pending.clear()
        if self._prompt_rest:
            text = text[_num_common(self._prompt_rest, text) :]
            self._prompt_rest = ""
        return text

    def _restart(self, token_ids: Sequence[int]) -> None:
        self._stream = DecodeStream(ids=list(token_ids), skip_special_tokens=True)


def _last_border(tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
    """How many of `token_ids` come before the character that they end within; all, where they end with a whole one."""
    for num in range(len(token_ids), 0, -1):
        if not tokenizer.decode(token_ids[:num]).endswith("\ufffd"):
            return num
    return 0


def _num_common(a: str, b: str) -> int:
    """How many characters both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@dataclass(frozen=True, slots=True)
class Match:
    """A stop string was found.

    Attributes:
        text: what may still be shown.
        stop: the string.
    """

    text: str
    stop: str


class StopStrings:
    """Finds the stop string that ends first in a text that comes in pieces; the result does not depend on the pieces.

    One that ends in a piece which is pushed with `counts=False` is passed over. One that only begins there is found.

    Args:
        stops: none empty.
        include: whether the match itself is shown.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, piece: str, *, counts: bool = True) -> str | Match:
        """The text that can be shown now, or the match. What might be the beginning of a match is held back."""
        if not self._stops or not piece:
            return piece
        text, num_before = self._held + piece, len(self._held)
        # The match that ends first; of two that end together, the longer.
        found = [(text.find(stop, max(0, num_before + 1 - len(stop))), stop) for stop in self._stops]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if ends and counts:
            end, start, stop = min(ends)
            return Match(text[: end if self._include else start], stop)
        num_held = self._num_possible(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """What is held when the sequence has ended without a match."""
        held, self._held = self._held, ""
        return held

    def _num_possible(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
