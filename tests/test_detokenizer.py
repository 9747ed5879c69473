"""Streamed text: whole characters, stop strings wherever the borders fall, nothing lost."""

import itertools

import hypothesis.strategies as st
import pytest
import tokenizers
from fakes import tokenizer_of_bytes, write_tokenizer
from hypothesis import assume, example, given, settings
from tokenizers import decoders, models

from router.detokenizer import Detokenizer, Match, StopStrings
from router.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("model")))


def stream(tokenizer: Tokenizer | tokenizers.Tokenizer, token_ids, prompt=()) -> list[str]:
    backend = tokenizer.backend if isinstance(tokenizer, Tokenizer) else tokenizer
    detokenizer = Detokenizer(backend, list(prompt))
    return [detokenizer.push(token_id) for token_id in token_ids]


@pytest.fixture(scope="module")
def byte_fallback() -> tokenizers.Tokenizer:
    """As SentencePiece's: "a", "b" and "." are tokens of their own, and of all else each byte is one, with its value.

    In a row of such tokens every byte becomes U+FFFD as long as one character in it is broken.
    """
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "b": 257, ".": 258, "<unk>": 259}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


# Tokens that end within a character, and have whole ones before it, by their ids: a space and half of an emoji, say.
CUT = {256: b" \xf0\x9f\x98", 257: "י".encode() + b"\xd7", 258: b"ab\xc3"}


@pytest.fixture(scope="module")
def cutting() -> tokenizers.Tokenizer:
    """Of all bytes, and of those tokens."""
    return tokenizer_of_bytes(CUT)


@given(ids=st.lists(st.sampled_from([*CUT, *b"a ", *"é🙂א".encode()]), max_size=12))
@settings(deadline=None)
def test_at_the_end_all_whole_characters_have_been_given(cutting, ids):
    data = b"".join(CUT.get(token_id, bytes([token_id % 256])) for token_id in ids)
    try:
        text = data.decode()
    except UnicodeDecodeError as broken:
        assume(broken.end == len(data) and broken.reason == "unexpected end of data")
        text = data[: broken.start].decode()
    detokenizer = Detokenizer(cutting)
    assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == text


# At the end of what there is, U+FFFD may stand for half a character: it waits for what comes behind it.
@given(text=st.text(max_size=40).filter(lambda text: not text.endswith("\ufffd")))
@settings(deadline=None)
def test_the_pieces_make_the_text_and_none_holds_half_a_character(tokenizer, text):
    pieces = stream(tokenizer, text.encode())
    assert "".join(pieces) == text
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


@given(prompt=st.text(max_size=20), text=st.text(max_size=20), cut=st.integers(0, 3))
@settings(deadline=None)
def test_a_prompt_cut_anywhere_never_leaks_into_the_text(tokenizer, prompt, text, cut):
    data = (prompt + text).encode()
    border = max(0, len(prompt.encode()) - cut)
    whole = "".join(stream(tokenizer, data[border:], prompt=data[:border]))
    assert whole.endswith(text)
    assert (prompt + text).endswith(whole)


@given(prompt=st.text(alphabet="aé\ufffd", max_size=12), text=st.text(alphabet="bé\ufffd", max_size=5))
@settings(deadline=None)
@example(prompt="\ufffd" * 3, text="\ufffd" * 3)
def test_a_prompt_that_ends_in_replacement_characters_keeps_them(tokenizer, prompt, text):
    assert "".join(stream(tokenizer, (text + ".").encode(), prompt=prompt.encode())) == text + "."


def test_bytes_that_are_no_character_are_not_held_for_ever(tokenizer):
    pieces = stream(tokenizer, b"\x80" * 40 + b"ok")
    assert "".join(pieces).endswith("ok")
    assert any(pieces[:20])


# Bytes, tokens from their beginning, and what is written so in the text itself.
@given(
    pieces=st.lists(
        st.sampled_from([b"\x80", b"\xff", b"\xf0\x9f", b"\xe6\xbc", *map(str.encode, "aé🙂\ufffd")]), max_size=40
    ),
    border=st.integers(0, 40),
)
@settings(deadline=None)
@example(pieces=["\ufffd".encode()] * 5 + ["é".encode()], border=0)
def test_bytes_that_are_no_character_cost_none_behind_them(tokenizer, pieces, border):
    prompt, output = b"".join(pieces[:border]), b"".join(pieces[border:]) + b"."
    text, alone = "".join(stream(tokenizer, output, prompt)), output.decode(errors="replace")
    assert (prompt + output).decode(errors="replace").endswith(text)
    # What the prompt ends within belongs to the output.
    assert text == alone if not prompt else abs(len(text) - len(alone)) <= 3


@pytest.mark.parametrize("row", ["漢 ? é", "漢 ? 漢 漢", "? 🙂", "é ? ? é"])
def test_of_a_row_with_a_broken_byte_each_byte_behind_it_leaves_a_mark(byte_fallback, row):
    """As the tokenizer has it; what came before was given, and stays."""
    first, *rest = [b"\x80" if piece == "?" else piece.encode() for piece in row.split()]
    before = "" if first == b"\x80" else first.decode()
    num_broken = sum(map(len, rest)) + (not before)
    token_ids = [*first, *b"".join(rest), *byte_fallback.encode("ab.").ids]
    assert "".join(stream(byte_fallback, token_ids)) == before + "\ufffd" * num_broken + "ab."


@given(prompt=st.text(alphabet="aé漢🙂\ufffd", max_size=12), text=st.text(alphabet="bé漢🙂\ufffd", max_size=30))
@settings(deadline=None)
@example(prompt="漢" * 3, text="漢")
def test_a_row_of_characters_that_are_bytes_to_the_tokenizer_is_whole(byte_fallback, prompt, text):
    prompt_ids, token_ids = byte_fallback.encode(prompt).ids, byte_fallback.encode(text + ".").ids
    assert "".join(stream(byte_fallback, token_ids, prompt_ids)) == text + "."


@given(
    prompt=st.text(alphabet="aé漢🙂", max_size=12),
    last=st.sampled_from("é漢🙂"),
    text=st.text(alphabet="bé漢🙂", max_size=12),
)
@settings(deadline=None)
@example(prompt="🙂" * 4, last="🙂", text="é")
def test_a_character_that_a_prompt_of_such_bytes_begins_is_whole(byte_fallback, prompt, last, text):
    begun = last.encode()[:-1]
    prompt_ids, token_ids = byte_fallback.encode(prompt).ids, byte_fallback.encode(text + ".").ids
    output = [*last.encode()[-1:], *token_ids]
    assert "".join(stream(byte_fallback, output, [*prompt_ids, *begun])) == last + text + "."


def test_special_tokens_have_no_text(tokenizer):
    assert "".join(stream(tokenizer, [ord("a"), 257, ord("b")])) == "ab"


@pytest.mark.parametrize("count", [1, 14, 15, 40])
def test_a_character_behind_many_special_tokens_is_whole(tokenizer, count):
    assert "".join(stream(tokenizer, [ord("a"), *[257] * count, *"🙂b".encode()])) == "a🙂b"


def show(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include=include)
    shown = ""
    for piece in pieces:
        found = matcher.push(piece)
        if isinstance(found, Match):
            return shown + found.text, found.stop
        shown += found
    return shown + matcher.flush(), None


def test_what_may_begin_a_stop_string_is_held_back_until_it_does_not():
    matcher = StopStrings(["</s>"], include=False)
    assert matcher.push("a<") == "a"
    assert matcher.push("/") == ""
    assert matcher.push("b") == "</b"
    assert matcher.push("</") == ""
    assert matcher.flush() == "</"


def test_the_match_that_ends_first_wins_and_of_two_that_end_together_the_longer():
    assert show(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert show(["bc", "abc"], ["abcd"]) == ("", "abc")


def test_cjk_and_emoji_stop_strings_match():
    assert show(["漢字"], ["あ漢", "字い"]) == ("あ", "漢字")
    assert show(["🙂"], ["a🙂b"], include=True) == ("a🙂", "🙂")


def test_a_stop_string_that_begins_before_it_counts_is_found_and_one_that_ends_there_is_not():
    matcher = StopStrings(["END", "ND"], include=False)
    assert matcher.push("a END b", counts=False) == "a END b"
    assert matcher.push("c EN", counts=False) == "c "
    assert matcher.push("D") == Match("", "END")
    assert StopStrings(["END"], include=False).push("END", counts=False) == "END"


@given(
    text=st.text(alphabet="ab", max_size=20),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    num_held_off=st.integers(0, 20),
)
@settings(deadline=None)
@example(text="abab", stops=["ab", "abaa"], num_held_off=2)  # held back for the other one, "ab" does not count later
def test_the_first_match_that_ends_where_it_counts_ends_the_text(text, stops, num_held_off):
    matcher = StopStrings(stops, include=False)
    shown, match = "", None
    for place, character in enumerate(text):
        found = matcher.push(character, counts=place >= num_held_off)
        if isinstance(found, Match):
            shown, match = shown + found.text, found.stop
            break
        shown += found
    ends = [
        (end, -len(stop), stop)
        for end in range(num_held_off + 1, len(text) + 1)
        for stop in stops
        if text[:end].endswith(stop)
    ]
    if ends:
        end, _, stop = min(ends)
        assert (shown, match) == (text[: end - len(stop)], stop)
    else:
        assert (shown + matcher.flush(), match) == (text, None)


@given(
    text=st.text(alphabet="ab.", max_size=30),
    stops=st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), max_size=3),
    borders=st.lists(st.integers(0, 30), max_size=6),
    include=st.booleans(),
)
@settings(deadline=None)
def test_the_result_does_not_depend_on_where_the_pieces_end(text, stops, borders, include):
    cuts = sorted({min(border, len(text)) for border in borders} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
    assert show(stops, pieces, include) == show(stops, list(text), include)
