"""What a request may say: each mistake is named with its remedy, all at once; the rest is resolved for the wire."""

import pytest
from fakes import EOS

from protos import session_pb2
from protos.columns import unpack, unpack_floats
from protos.errors import Refusal, Violation
from protos.pagewire.v1 import generation_pb2 as pb
from router.check import RequestLimits, ServedModel, check_before_tokenizing, check_tokenize
from router.resolve import CheckedRequest, resolve
from router.tokenizer import GenerationDefaults

# The model's own generation_config asks for sampling with filters.
DEFAULTS = GenerationDefaults(eos_token_ids=(EOS,), temperature=0.7, top_p=0.9, top_k=40, min_p=0.1)
MODEL = ServedModel("fake", context_length=200, vocabulary_size=260, max_num_seqs=8, defaults=DEFAULTS)


def wanted(stop=None, output=None, priority=0, cache_salt="", **sampling) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text="x",
        sampling=pb.SamplingParams(**sampling),
        stop=stop,
        output=output,
        priority=priority,
        cache_salt=cache_salt,
    )


def violations_of(request: pb.GenerateRequest) -> list[tuple[str, str]]:
    with pytest.raises(Refusal) as info:
        check_before_tokenizing(request, MODEL, max_token_bytes=1)
    assert info.value.reason == "INVALID_REQUEST"
    return [(violation.field, violation.description) for violation in info.value.violations]


def checked(request: pb.GenerateRequest, model: ServedModel = MODEL) -> CheckedRequest:
    check_before_tokenizing(request, model, max_token_bytes=1)
    return resolve(request, "r", [1, 2, 3], "", model, whole=True)


STOP_STRINGS = pb.StopConditions(strings=["END"])
BAD = [
    ({"best_of": 0}, "sampling.best_of", "is 0; must be in 1 (n) .. 8"),
    ({"best_of": 9}, "sampling.best_of", "is 9; must be in 1 (n) .. 8"),
    ({"best_of": 2, "n": 3}, "sampling.best_of", "is 2; must be in 3 (n) .. 8"),
    ({"best_of": 2, "n": 9}, "sampling.n", "is 9; must be in 1 .. 8"),
    ({"best_of": 2, "beam_width": 2}, "sampling.best_of", "leave it unset, and set n"),
    ({"beam_width": -1}, "sampling.beam_width", "is -1; must be in 0 (no beam search) .. 8"),
    ({"beam_width": 9}, "sampling.beam_width", "is 9; must be in 0 (no beam search) .. 8"),
    ({"beam_width": 2, "n": 3}, "sampling.n", "is 3; must be at most beam_width (2)"),
    ({"beam_width": 2, "temperature": 0.5}, "sampling.temperature", "is 0.5; a beam search is greedy: leave it unset"),
    (
        {"beam_width": 2, "top_p": 0.5},
        "sampling.top_p",
        "is 0.5; a beam search filters no tokens: leave it unset, or 1",
    ),
    ({"beam_width": 2, "top_k": 5}, "sampling.top_k", "leave it unset, or 0"),
    ({"beam_width": 2, "min_p": 0.5}, "sampling.min_p", "leave it unset, or 0"),
    (
        {"beam_width": 2, "typical_p": 0.5},
        "sampling.typical_p",
        "a beam search filters no tokens: leave it unset, or 1",
    ),
    (
        {"beam_width": 2, "repetition_penalty": 1.5},
        "sampling.repetition_penalty",
        "with beam_width: leave it unset, or 1",
    ),
    ({"beam_width": 2, "presence_penalty": 1}, "sampling.presence_penalty", "with beam_width: leave it unset, or 0"),
    ({"beam_width": 2, "frequency_penalty": 1}, "sampling.frequency_penalty", "with beam_width: leave it unset, or 0"),
    ({"beam_width": 2, "output": pb.OutputOptions(logprobs=0)}, "output.logprobs", "cannot be combined"),
    ({"output": pb.OutputOptions(logprobs=21)}, "output.logprobs", "is 21; must be in 0 .. 20"),
    ({"output": pb.OutputOptions(logprobs=-1)}, "output.logprobs", "is -1; must be in 0 .. 20"),
    ({"output": pb.OutputOptions(prompt_logprobs=21)}, "output.prompt_logprobs", "is 21; must be in 0 .. 20"),
    ({"typical_p": 0}, "sampling.typical_p", "is 0; must be in (0, 1]"),
    ({"typical_p": 1.1}, "sampling.typical_p", "is 1.1; must be in (0, 1]"),
    ({"repetition_penalty": 0}, "sampling.repetition_penalty", "is 0; must be over 0; 1 is off"),
    ({"repetition_penalty": float("inf")}, "sampling.repetition_penalty", "must be over 0; 1 is off"),
    ({"presence_penalty": 2.1}, "sampling.presence_penalty", "is 2.1; must be in [-2, 2]"),
    ({"frequency_penalty": float("nan")}, "sampling.frequency_penalty", "is nan; must be in [-2, 2]"),
    ({"logit_bias": {7: 101}}, "sampling.logit_bias[7]", "must be in [-100, 100]"),
    ({"logit_bias": {260: 1}}, "sampling.logit_bias[260]", "260 is outside the vocabulary"),
    ({"beam_width": 2, "stop": STOP_STRINGS}, "stop.strings", "use stop.token_ids"),
    ({"beam_width": 2, "length_penalty": 10.5}, "sampling.length_penalty", "is 10.5; must be in [-10, 10]"),
    ({"beam_width": 2, "length_penalty": float("nan")}, "sampling.length_penalty", "is nan; must be in [-10, 10]"),
    ({"length_penalty": 2}, "sampling.length_penalty", "is 2; applies to a beam search only: leave it unset, or set"),
    ({"early_stopping": pb.EARLY_STOPPING_TRUE}, "sampling.early_stopping", "applies to a beam search only"),
    ({"early_stopping": 9}, "sampling.early_stopping", "is 9; must be a value of EarlyStopping"),
    ({"beam_width": 2, "early_stopping": 9}, "sampling.early_stopping", "is 9; must be a value of EarlyStopping"),
    ({"priority": 11}, "priority", "is 11; must be in -10 .. 10"),
    ({"priority": -11}, "priority", "is -11; must be in -10 .. 10"),
    ({"cache_salt": "é"}, "cache_salt", "printable ASCII"),
    ({"cache_salt": "a\n"}, "cache_salt", "printable ASCII"),
    ({"cache_salt": "s" * 129}, "cache_salt", "at most 128 bytes"),
]


@pytest.mark.parametrize(("options", "field", "words"), BAD)
def test_a_mistake_is_the_one_violation_and_says_what_would_be_right(options, field, words):
    ((named, description),) = violations_of(wanted(**options))
    assert named == field
    assert words in description


@pytest.mark.parametrize("n", [0, 9])
def test_of_an_n_that_is_out_of_range_itself_best_of_is_told_nothing(n):
    assert violations_of(wanted(n=n, best_of=10)) == [
        ("sampling.n", f"is {n}; must be in 1 .. 8"),
        ("sampling.best_of", "is 10; must be in 1 .. 8"),
    ]


def test_everything_that_does_not_go_with_a_beam_search_is_named_at_once():
    request = wanted(STOP_STRINGS, beam_width=2, n=3, best_of=4, temperature=1, top_p=0.5, priority=99)
    assert [field for field, _ in violations_of(request)] == [
        "sampling.n",
        "sampling.best_of",
        "sampling.temperature",
        "sampling.top_p",
        "stop.strings",
        "priority",
    ]


@pytest.mark.parametrize(
    "sampling",
    [
        {"beam_width": 2, "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "n": 2, "typical_p": 1},
        {"beam_width": 2, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0},
        {"beam_width": 2, "logit_bias": {259: -100, 0: 100}, "output": pb.OutputOptions(prompt_logprobs=20)},
        {"typical_p": 1e-3, "presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1e-3},
        {"output": pb.OutputOptions(logprobs=20, prompt_logprobs=0)},
        {"beam_width": 8, "n": 8, "length_penalty": -10, "early_stopping": pb.EARLY_STOPPING_NEVER},
        {"beam_width": 0, "length_penalty": 1, "early_stopping": pb.EARLY_STOPPING_FALSE},
        {"best_of": 8, "n": 8},
        {"best_of": 3, "temperature": 0},
    ],
)
def test_what_has_no_effect_or_is_at_the_edge_is_taken(sampling):
    checked(wanted(**sampling))


# Each range's ends are taken, and what is next to them is refused.
EDGES = [
    ("temperature", (0, 100), (-0.5, 100.5)),
    ("top_p", (1e-3, 1), (0, 1.5)),
    ("top_k", (0,), (-1,)),
    ("min_p", (0, 1), (-0.5, 1.5)),
    ("typical_p", (1e-3, 1), (0, 1.5)),
    ("repetition_penalty", (1e-3,), (0, float("inf"))),
    ("presence_penalty", (-2, 2), (-2.5, 2.5)),
    ("frequency_penalty", (-2, 2), (-2.5, 2.5)),
    ("n", (1, 8), (0, 9)),
    ("best_of", (1, 8), (0, 9)),
    ("beam_width", (0, 8), (-1, 9)),
]


@pytest.mark.parametrize(("name", "taken", "refused"), EDGES)
def test_the_ends_of_a_range_are_in_it(name, taken, refused):
    for value in taken:
        checked(wanted(**{name: value}))
    for value in refused:
        assert [field for field, _ in violations_of(wanted(**{name: value}))] == [f"sampling.{name}"]


def test_the_length_penalty_of_a_beam_search_is_in_its_range_and_so_is_a_bias():
    for value in (-10, 10):
        checked(wanted(beam_width=2, length_penalty=value, logit_bias={259: value * 10}))
        too_far = wanted(beam_width=2, length_penalty=value * 1.05, logit_bias={259: value * 10.05})
        assert [field for field, _ in violations_of(too_far)] == ["sampling.length_penalty", "sampling.logit_bias[259]"]


@pytest.mark.parametrize(
    ("taken", "refused", "field"),
    [
        ({"max_tokens": 1, "min_tokens": 1}, {"max_tokens": 0, "min_tokens": 1}, "stop.max_tokens"),
        ({"max_tokens": 5, "min_tokens": 5}, {"max_tokens": 5, "min_tokens": 6}, "stop.min_tokens"),
        ({"min_tokens": 0}, {"min_tokens": -1}, "stop.min_tokens"),
        ({"strings": ["s"] * 16}, {"strings": ["s"] * 17}, "stop.strings"),
        ({"strings": ["a", "é" * 1024]}, {"strings": ["a", "é" * 1025]}, "stop.strings[1]"),
        ({"strings": ["a", "b"]}, {"strings": ["a", ""]}, "stop.strings[1]"),
        ({"token_ids": [259] * 128}, {"token_ids": [259] * 129}, "stop.token_ids"),
        ({"token_ids": [0, 259]}, {"token_ids": [0, 260]}, "stop.token_ids[1]"),
    ],
)
def test_a_stop_condition_may_be_as_long_and_as_high_as_that(taken, refused, field):
    checked(wanted(pb.StopConditions(**taken)))
    assert [field for field, _ in violations_of(wanted(pb.StopConditions(**refused)))] == [field]


def test_without_max_tokens_min_tokens_may_be_what_the_context_has_room_for():
    """The prompt has 3 of 200 tokens."""
    assert checked(wanted(pb.StopConditions(min_tokens=197))).max_tokens == 197
    with pytest.raises(Refusal, match=r"stop.min_tokens: is 198; must be at most 197: the prompt's 3 tokens and"):
        checked(wanted(pb.StopConditions(min_tokens=198)))


def test_a_prompt_leaves_room_for_one_token():
    longest = [7] * 199
    assert resolve(wanted(), "r", longest, "", MODEL, whole=False).max_tokens == 1
    with pytest.raises(Refusal) as info:
        resolve(wanted(pb.StopConditions(max_tokens=5)), "r", [*longest, 7], "", MODEL, whole=False)
    too_long = "has 200 tokens; at most 199 fit into a context of 200 with one to sample"
    assert info.value.violations == (Violation("text", too_long),), "of the output that is all there is to say"
    with pytest.raises(Refusal, match=r"token_ids\.ids: are 200 tokens; at most 199 fit"):
        checked(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[*longest, 7])))
    checked(pb.GenerateRequest(token_ids=pb.TokenIds(ids=longest)))


def test_a_text_with_a_token_that_the_model_has_no_embedding_for_is_refused():
    with pytest.raises(Refusal, match=r"text\[1\]: 260 is outside the vocabulary: 0 \.\. 259"):
        resolve(wanted(), "r", [259, 260], "", MODEL, whole=False)


def test_a_text_that_has_no_tokens_is_no_prompt():
    with pytest.raises(Refusal, match="text: must not be empty: it gives no tokens"):
        resolve(wanted(), "r", [], "", MODEL, whole=False)


def test_a_text_or_chat_is_refused_untokenized_only_if_it_surely_has_too_many_tokens():
    """No token has more than 4 bytes here, and a prompt may have 199 tokens."""
    turns = [pb.ChatMessage(role="é", content="x" * 398), pb.ChatMessage(role="é", content="x" * 397)]
    longest = [{"text": "é" * 399 + "x"}, {"chat": pb.Chat(messages=turns)}]
    turns[1].content += "x"
    longer = [{"text": "é" * 400}, {"chat": pb.Chat(messages=turns)}]
    for fits, is_too_long in zip(longest, longer, strict=True):
        check_before_tokenizing(pb.GenerateRequest(**fits), MODEL, max_token_bytes=4)
        check_tokenize(pb.TokenizeRequest(**fits), MODEL, max_token_bytes=4)
        for check, request in (
            (check_before_tokenizing, pb.GenerateRequest(**is_too_long)),
            (check_tokenize, pb.TokenizeRequest(**is_too_long)),
        ):
            with pytest.raises(Refusal, match="has at least 200 tokens; at most 199 fit"):
                check(request, MODEL, max_token_bytes=4)


def test_a_chat_of_more_messages_than_a_prompt_may_have_tokens_is_refused_unread():
    turn = pb.ChatMessage(role="r")
    check_before_tokenizing(pb.GenerateRequest(chat=pb.Chat(messages=[turn] * 199)), MODEL, max_token_bytes=4)
    assert violations_of(pb.GenerateRequest(chat=pb.Chat(messages=[turn] * 200))) == [
        (
            "chat.messages",
            "are 200, each a token at least; at most 199 fit into a context of 200 with one to sample",
        )
    ]


def test_of_ids_outside_the_vocabulary_the_first_eight_are_named():
    checked(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0, 259])))
    assert violations_of(pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(259, 280)))) == [
        (f"token_ids.ids[{place}]", f"{259 + place} is outside the vocabulary: 0 .. 259") for place in range(1, 9)
    ]


@pytest.mark.parametrize("name", ["request_id", "x-request-id", "cache_salt"])
def test_names_are_up_to_128_printable_characters(name):
    def check(value: str) -> None:
        header_id = value if name == "x-request-id" else ""
        request = pb.GenerateRequest(text="x", **({} if header_id else {name: value}))
        check_before_tokenizing(request, MODEL, max_token_bytes=1, header_id=header_id)

    check("n" * 128)
    for wrong in ("n" * 129, "é", "a\n"):
        with pytest.raises(Refusal, match=f"{name}: must be at most 128 bytes of printable ASCII"):
            check(wrong)


def test_what_the_operator_allows_bounds_what_the_model_could_do_and_never_widens_it():
    limits = RequestLimits(max_prompt_tokens=50, max_output_tokens=20, max_n=4, max_beam_width=0)
    fewer = ServedModel("fake", 200, 260, max_num_seqs=8, defaults=DEFAULTS, limits=limits)
    assert (fewer.max_prompt_tokens, fewer.max_output_tokens, fewer.max_n, fewer.max_beam_width) == (50, 20, 4, 0)
    checked(wanted(pb.StopConditions(max_tokens=20)), fewer)
    with pytest.raises(Refusal, match="is 21; must be at most 20: outputs may not be longer here"):
        checked(wanted(pb.StopConditions(max_tokens=21)), fewer)
    with pytest.raises(Refusal, match="has 51 tokens; prompts may have 50 tokens here: send a shorter one"):
        resolve(wanted(), "r", [7] * 51, "", fewer, whole=False)
    more = ServedModel("fake", 200, 260, 8, DEFAULTS, RequestLimits(1000, 1000, 1000, 1000))
    assert (more.max_prompt_tokens, more.max_output_tokens, more.max_n, more.max_beam_width) == (199, 199, 8, 8)


def test_a_sequence_stops_at_the_clients_ids_and_the_models_own_unless_these_are_ignored():
    stop = pb.StopConditions(token_ids=[7, EOS, 7])
    assert checked(wanted(stop)).stop_token_ids == (7, EOS)
    assert checked(wanted()).stop_token_ids == (EOS,)
    assert checked(wanted(pb.StopConditions(token_ids=[7], ignore_eos=True))).stop_token_ids == (7,)


def test_best_of_asks_the_scheduler_for_more_sequences_than_are_answered():
    assert (checked(wanted()).n, checked(wanted()).num_sequences) == (1, 1)
    assert (checked(wanted(n=3)).n, checked(wanted(n=3)).num_sequences) == (3, 3)
    request = checked(wanted(n=2, best_of=5))
    assert (request.n, request.num_sequences, request.beam_search) == (2, 5, None)


def test_a_beam_search_is_greedy_whatever_the_models_own_config_says():
    sampling = checked(wanted(beam_width=2)).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 1, 0, 0)
    sampling = checked(wanted()).sampling
    assert (sampling.temperature, sampling.top_k) == (pytest.approx(0.7), 40)


def test_a_beam_searchs_defaults_are_a_length_penalty_of_one_and_early_stopping_false():
    request = checked(wanted(beam_width=3, n=2))
    assert (request.n, request.num_sequences) == (2, 2)
    search = session_pb2.BeamSearch(width=3, length_penalty=1, early_stopping=session_pb2.EARLY_STOPPING_FALSE)
    assert request.beam_search == search


@pytest.mark.parametrize("name", ["TRUE", "FALSE", "NEVER"])
def test_what_a_beam_search_is_told_reaches_the_scheduler(name):
    request = checked(wanted(beam_width=1, length_penalty=0, early_stopping=f"EARLY_STOPPING_{name}"))
    early_stopping = session_pb2.EarlyStopping.Value(f"EARLY_STOPPING_{name}")
    assert request.beam_search == session_pb2.BeamSearch(width=1, length_penalty=0, early_stopping=early_stopping)


def test_priority_and_salt_are_handed_on():
    request = checked(wanted(priority=-10, cache_salt="tenant 7"))
    assert (request.priority, request.cache_salt) == (-10, "tenant 7")


def test_the_same_logit_biases_are_the_same_request_in_any_order():
    there, back = pb.SamplingParams(), pb.SamplingParams()
    there.ParseFromString(b"".join(bias_bytes(token_id) for token_id in (7, 5)))
    back.ParseFromString(b"".join(bias_bytes(token_id) for token_id in (5, 7)))
    assert dict(there.logit_bias) == {5: 1.0, 7: 1.0} == dict(back.logit_bias)
    one, other = (checked(pb.GenerateRequest(text="x", sampling=params)).sampling for params in (there, back))
    one.seed = other.seed = 1
    assert one == other


def bias_bytes(token_id: int) -> bytes:
    """A bias of 1 for a token, as it stands in a message."""
    return pb.SamplingParams(logit_bias={token_id: 1.0}).SerializeToString()


def test_logit_biases_are_bounded():
    many = ServedModel("fake", context_length=200, vocabulary_size=5000, max_num_seqs=8, defaults=DEFAULTS)
    checked(wanted(logit_bias=dict.fromkeys(range(1024), 1.0)), many)
    with pytest.raises(Refusal, match="at most 1024"):
        checked(wanted(logit_bias=dict.fromkeys(range(1025), 1.0)), many)


def test_a_vocabulary_of_few_tokens_bounds_the_log_probabilities_that_can_be_asked_for():
    few = ServedModel("fake", context_length=200, vocabulary_size=7, max_num_seqs=8, defaults=GenerationDefaults(()))
    checked(wanted(output=pb.OutputOptions(logprobs=7)), few)
    with pytest.raises(Refusal, match=r"must be in 0 \.\. 7"):
        checked(wanted(output=pb.OutputOptions(logprobs=8)), few)


def test_how_to_sample_and_what_to_tell_is_handed_on():
    sampling = checked(
        wanted(
            typical_p=0.5,
            repetition_penalty=1.25,
            presence_penalty=-0.5,
            frequency_penalty=0.5,
            logit_bias={7: 1.5, 3: -100},
            output=pb.OutputOptions(logprobs=0, prompt_logprobs=5),
        )
    ).sampling
    assert (sampling.typical_p, sampling.repetition_penalty) == (0.5, 1.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-0.5, 0.5)
    biases = zip(unpack(sampling.bias_token_ids), unpack_floats(sampling.biases), strict=True)
    assert dict(biases) == {7: 1.5, 3: -100}
    assert sampling.HasField("num_top_logprobs")
    assert (sampling.num_top_logprobs, sampling.num_prompt_logprobs) == (0, 5)


def test_who_asks_for_nothing_of_this_has_it_off():
    sampling = checked(wanted()).sampling
    assert (sampling.typical_p, sampling.repetition_penalty) == (1, 1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.bias_token_ids) == (0, 0, b"")
    assert not sampling.HasField("num_top_logprobs")
    assert not sampling.HasField("num_prompt_logprobs")


def test_the_models_own_repetition_penalty_and_typical_p_apply_where_nothing_else_is_said():
    defaults = GenerationDefaults(eos_token_ids=(EOS,), typical_p=0.5, repetition_penalty=1.25)
    model = ServedModel("fake", context_length=200, vocabulary_size=260, max_num_seqs=8, defaults=defaults)
    sampling = checked(wanted(), model).sampling
    assert (sampling.typical_p, sampling.repetition_penalty) == (0.5, 1.25)
    sampling = checked(wanted(repetition_penalty=1), model).sampling
    assert sampling.repetition_penalty == 1
    sampling = checked(wanted(beam_width=2), model).sampling
    assert (sampling.typical_p, sampling.repetition_penalty) == (1, 1), "not in a beam search"


def test_who_says_nothing_samples_from_all_tokens_as_they_are_where_the_model_says_nothing_either():
    silent = ServedModel("fake", 200, 260, max_num_seqs=8, defaults=GenerationDefaults(()))
    sampling = checked(wanted(), silent).sampling
    assert (sampling.temperature, sampling.repetition_penalty) == (1, 1)
    assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.typical_p) == (1, 0, 0, 1)


def test_a_seed_is_the_clients_or_drawn_anew():
    assert checked(wanted(seed=2**64 - 1)).sampling.seed == 2**64 - 1
    assert checked(wanted()).sampling.seed != checked(wanted()).sampling.seed


def test_the_prompt_is_repeated_for_as_many_outputs_as_go_into_a_message():
    request = pb.GenerateRequest(text="p", output=pb.OutputOptions(echo=True), sampling=pb.SamplingParams(n=8))
    assert resolve(request, "r", [1], "é" * (1 << 19), MODEL, whole=False).echo
    with pytest.raises(Refusal) as info:
        resolve(request, "r", [1], "é" * (1 << 19) + "x", MODEL, whole=False)
    (violation,) = info.value.violations
    assert violation.field == "output.echo"
    assert "8388616 bytes for 8 outputs, of at most 8388608" in violation.description


def test_a_prompt_so_long_that_its_log_probabilities_fill_no_message_is_refused():
    long = ServedModel("fake", context_length=10**6, vocabulary_size=260, max_num_seqs=8, defaults=DEFAULTS)
    request = wanted(output=pb.OutputOptions(prompt_logprobs=19))
    assert resolve(request, "r", [1] * 50_000, "", long, whole=False).sampling.num_prompt_logprobs == 19
    with pytest.raises(Refusal, match="asks for 1000020 with 1 x 50001 tokens; at most 1000000"):
        resolve(request, "r", [1] * 50_001, "", long, whole=False)


@pytest.mark.parametrize(("best_of", "whole"), [(8, True), (9, False)])
def test_log_probabilities_are_bounded_where_they_are_kept_until_all_are_there(best_of, whole):
    long = ServedModel("fake", context_length=100_000, vocabulary_size=260, max_num_seqs=16, defaults=DEFAULTS)
    request = wanted(output=pb.OutputOptions(logprobs=20), n=8, best_of=best_of)
    with pytest.raises(Refusal, match=f" with {best_of} x 99999 tokens; at most 1000000 are told: set stop"):
        resolve(request, "r", [1], "", long, whole=whole)
    request.stop.max_tokens = 5000
    assert resolve(request, "r", [1], "", long, whole=whole).max_tokens == 5000


def test_log_probabilities_of_what_is_streamed_as_it_comes_are_not():
    long = ServedModel("fake", context_length=100_000, vocabulary_size=260, max_num_seqs=16, defaults=DEFAULTS)
    request = wanted(output=pb.OutputOptions(logprobs=20), n=8)
    assert resolve(request, "r", [1], "", long, whole=False).max_tokens == 99_999
