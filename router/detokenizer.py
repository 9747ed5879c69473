"""One sequence's token ids to text as they come: whole characters, and nothing that a stop string may still claim."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# A character has at most four bytes, so this many tokens that complete none are no character at all.
_MAX_PENDING_TOKENS = 16
# Prompt tokens that the first output token is decoded after: it may begin with a space, or continue a character.
_NUM_PROMPT_TOKENS = 8
# In bytes, and so in tokens at most.
_LONGEST_CHARACTER = 4
# Stands for bytes that make no character, or none yet; a text may contain it, too.
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of a growing sequence.

    Args:
        tokenizer: the model's.
        prompt_token_ids: what the sequence continues.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._go_on_behind(prompt_token_ids)

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # its only type: the token changed the text before it, which was given
            return self._give(len(self._pending))
        if text is None and not self._tokenizer.decode(self._pending):
            self._pending.clear()  # special tokens, which have no text
        if text is None:
            return self._give(self._num_broken()) if len(self._pending) >= _MAX_PENDING_TOKENS else ""
        self._pending.clear()
        return self._new_in(text)

    def flush(self) -> str:
        """The whole characters of the pending tokens, when none follow: a character that was only begun is left out."""
        whole = self._tokenizer.decode(self._pending).rstrip(_REPLACEMENT) if self._pending else ""
        return self._new_in(whole)

    def _go_on_behind(self, token_ids: Sequence[int]) -> None:
        """Starts over after tokens whose text was given."""
        tail = _tail(self._tokenizer, token_ids)
        border = _last_border(self._tokenizer, tail)
        self._pending: list[int] = []
        self._given = ""
        self._stream = DecodeStream(ids=tail[:border], skip_special_tokens=True)
        # A character that was begun belongs to what comes: if the library took it as given, it would repeat what was
        # given with it. Its bytes so far look like a U+FFFD that was given as such: if it still is one after the next
        # token, it was.
        for token_id in tail[border:]:
            self.push(token_id)
        self._given = self._tokenizer.decode(tail[border:])

    def _num_broken(self) -> int:
        """How many pending tokens form no character: all, or those before one that may begin at their end."""
        pending = self._pending
        nums = range(len(pending), len(pending) - _LONGEST_CHARACTER, -1)
        return min(nums, key=lambda num: _num_replaced(self._tokenizer, pending[:num]))

    def _give(self, num: int) -> str:
        """The text of the first `num` pending tokens as it is, and the whole characters of those after them."""
        pending = self._pending
        text = self._new_in(self._tokenizer.decode(pending[:num]))
        self._go_on_behind(pending[:num])
        return text + "".join([self.push(token_id) for token_id in pending[num:]])

    def _new_in(self, text: str) -> str:
        """What was not given yet of `text`, which is that of the tokens that were pending."""
        given, self._given = self._given, ""
        return text[_num_common(given, text) :]


def _num_replaced(tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
    """How many U+FFFD the text has. Some tokenizers make one for every byte of a run with one broken character."""
    return tokenizer.decode(list(token_ids)).count(_REPLACEMENT)


def _tail(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """The last tokens, from where a character begins: with as few broken ones as possible, whatever comes last."""

    def num_replaced(length: int) -> int:
        tail = token_ids[-length:]
        return min(_num_replaced(tokenizer, tail[: len(tail) - rest]) for rest in range(_LONGEST_CHARACTER))

    lengths = range(_NUM_PROMPT_TOKENS, _NUM_PROMPT_TOKENS + _LONGEST_CHARACTER)
    return list(token_ids[-min(lengths, key=num_replaced) :])


def _last_border(tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
    """How many of `token_ids` come before an unfinished character at their end; all, if they end with a whole one."""
    for num in range(len(token_ids), 0, -1):
        if not tokenizer.decode(token_ids[:num]).endswith(_REPLACEMENT):
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

    A stop string that ends in a piece pushed with `counts=False` is ignored. One that only begins there is found.

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
        """Length of the longest suffix of `text` that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
