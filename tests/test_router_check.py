"""What a request may say: each mistake is named with its remedy, all at once; the rest is resolved for the wire."""

import pytest
from fakes import EOS

from protos import session_pb2
from protos.columns import unpack, unpack_floats
from protos.errors import Refusal
from protos.pagewire.v1 import generation_pb2 as pb
from router.check import ServedModel, check_before_tokenizing
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
