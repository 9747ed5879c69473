"""The command line against a scripted server: what each command writes, on which stream, and with which status."""

import json
import os
import signal
import subprocess
import sys
from datetime import datetime
from importlib import metadata

import grpc
import pytest
from authority import Authority
from pagewire_fakes import FakeGeneration, delta, last, serving
from typer.testing import CliRunner

from pagewire import bench, bench_report, resumption, state, terminal
from pagewire.bench import BenchError, Record, Row
from pagewire.cli import app
from pagewire.processes import peak_resident_bytes, start_ticks
from pagewire.results import Completion, Output, Timings, Usage
from pagewire.state import ClusterState
from protos.errors import Refusal, Violation, invalid_argument, unavailable
from protos.pagewire.v1 import generation_pb2 as pb

STOP = {"finish_reason": pb.FINISH_REASON_STOP}


@pytest.fixture
def fake():
    return FakeGeneration()


@pytest.fixture
def target(fake):
    with serving(fake) as address:
        yield address


@pytest.fixture
def run(target, tmp_path, monkeypatch):
    """Runs a command with its --target, in a user's folders of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(resumption, "_LONGEST_DELAY_S", 0.01)

    def run(command: str, *arguments: str, stdin: str | None = None):
        return CliRunner().invoke(app, [command, *arguments, "--target", target], input=stdin)

    return run


def refuse(refusal: Refusal):
    def script(request):
        raise refusal
        yield

    return script


# generate


def test_generate_writes_the_text_and_beside_it_how_fast_it_came(run, fake):
    shown = run("generate", "Hi", "--max-tokens", "3", "--temperature", "0", "--stop", "a", "--stop", "b")
    assert (shown.exit_code, shown.stdout) == (0, "Hello, world\n")
    assert shown.stderr == "TTFT 100 ms, 10.0 tokens/s, 3 tokens in 0.30 s (prompt of 5, 2 cached)\n"
    (request,) = fake.requests
    assert (request.text, request.stop.max_tokens, list(request.stop.strings)) == ("Hi", 3, ["a", "b"])
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")


def test_generate_writes_several_answers_one_after_the_other(run, fake):
    fake.script = lambda request: [
        delta("x", index=0),
        delta("y\n", index=1, finish_reason=pb.FINISH_REASON_LENGTH),
        last(delta("z", index=0, **STOP)),
    ]
    shown = run("generate", "Hi", "-n", "2", "--seed", "7")
    assert shown.stdout == "--- 1: length ---\ny\n\n--- 0: stop ---\nxz\n"
    assert (fake.requests[0].sampling.n, fake.requests[0].sampling.seed) == (2, 7)


def test_generate_passes_on_how_to_search_and_whom_to_prefer(run, fake):
    options = ["--beam-width", "4", "--n", "2", "--length-penalty", "0.5", "--early-stopping", "never"]
    shown = run("generate", "Hi", *options, "--priority", "-3", "--cache-salt", "mine")
    assert shown.exit_code == 0, shown.output
    (request,) = fake.requests
    sampling = request.sampling
    assert (sampling.beam_width, sampling.n, sampling.length_penalty) == (4, 2, 0.5)
    assert sampling.early_stopping == pb.EARLY_STOPPING_NEVER
    assert (request.priority, request.cache_salt) == (-3, "mine")
    run("generate", "Hi", "--best-of", "3")
    assert fake.requests[1].sampling == pb.SamplingParams(best_of=3), "what is not given is not sent"


@pytest.mark.parametrize(("word", "value"), [("true", pb.EARLY_STOPPING_TRUE), ("false", pb.EARLY_STOPPING_FALSE)])
def test_early_stopping_is_a_word(run, fake, word, value):
    run("generate", "Hi", "--beam-width", "2", "--early-stopping", word)
    assert fake.requests[0].sampling.early_stopping == value


@pytest.mark.parametrize("options", [["--beam-width", "2"], ["--best-of", "2"]])
def test_an_answer_that_comes_at_once_has_no_rate(run, options):
    shown = run("generate", "Hi", *options)
    assert shown.stderr == "3 tokens in 0.30 s (prompt of 5, 2 cached)\n"


def test_generate_prints_everything_as_one_json_object(run):
    shown = run("generate", "Hi", "--json")
    assert json.loads(shown.stdout) == {
        "request_id": "r1",
        "outputs": [
            {
                "index": 0,
                "text": "Hello, world",
                "token_ids": [1, 2, 3],
                "finish_reason": "stop",
                "stop_match": 2,
                "cumulative_logprob": -1.5,
                "logprobs": [],
                "finish_message": "",
            }
        ],
        "usage": {"prompt_tokens": 5, "cached_prompt_tokens": 2, "completion_tokens": 3},
        "timings": {"queue_ms": 1.0, "ttft_ms": 100.0, "total_ms": 300.0, "preemptions": 0},
        "prompt_logprobs": [],
    }
    assert shown.stderr == ""


def test_generate_passes_on_penalties_and_biases(run, fake):
    options = ["--repetition-penalty", "1.5", "--presence-penalty", "-1", "--frequency-penalty", "2"]
    shown = run("generate", "Hi", *options, "--typical-p", "0.5", "--logit-bias", "7=-100", "--logit-bias", "3=1.5")
    assert shown.exit_code == 0, shown.output
    expected = pb.SamplingParams(repetition_penalty=1.5, presence_penalty=-1, frequency_penalty=2, typical_p=0.5)
    expected.logit_bias.update({7: -100, 3: 1.5})
    assert fake.requests[0].sampling == expected
    assert "must be ID=BIAS" in run("generate", "Hi", "--logit-bias", "seven").output


def test_generate_shows_log_probabilities_below_the_text(run, fake):
    def token(token_id, logprob, rank, *top):
        tops = [pb.TokenLogprob(token_id=top_id, logprob=value) for top_id, value in top]
        return pb.TokenLogprobs(token_id=token_id, logprob=logprob, rank=rank, top=tops)

    def script(request):
        if isinstance(request, pb.DetokenizeRequest):
            return
        message = delta("ab", logprobs=[token(1, -0.5, 1, (1, -0.5), (2, -1.25)), token(2, -1.5, 2, (1, -0.25))])
        message.prompt_logprobs.append(token(7, -12.5, 999))
        yield last(message)

    fake.script = script
    shown = run("generate", "Hi", "--logprobs", "2", "--prompt-logprobs", "0")
    assert shown.stdout.splitlines() == [
        "ab",
        "--- log-probabilities of the prompt ---",
        "'7'               -12.500  rank 999",
        "--- log-probabilities of 0 ---",
        "'1'                -0.500  rank 1      '1' -0.500  '2' -1.250",
        "'2'                -1.500  rank 2      '1' -0.250",
    ]
    asked = [list(request.token_ids) for request in fake.requests if isinstance(request, pb.DetokenizeRequest)]
    assert asked == [[7], [1], [2]], "each token is asked for once"


@pytest.mark.parametrize("more", [[], ["--json"]])
@pytest.mark.parametrize(
    ("reason", "exit_code"), [(pb.FINISH_REASON_LENGTH, 0), (pb.FINISH_REASON_IGNORED, 1)], ids=["length", "ignored"]
)
def test_generate_says_why_an_answer_ended_for_want_of_blocks(run, fake, reason, exit_code, more):
    why = "needs 9 KV blocks, and the pool has 4"
    fake.script = lambda request: [last(delta("", finish_reason=reason, finish_message=why))]
    shown = run("generate", "Hi", *more)
    assert (shown.exit_code, shown.stderr.splitlines()[0]) == (exit_code, why)
    if more:
        assert json.loads(shown.stdout)["outputs"][0]["finish_message"] == why


@pytest.mark.parametrize(
    ("refusal", "line"),
    [
        (
            invalid_argument([Violation("sampling.n", "must be 1 or more"), Violation("text", "must not be empty")]),
            "error: sampling.n: must be 1 or more; text: must not be empty\n",
        ),
        (unavailable("DRAINING", "the server drains"), "error: the server drains; try again in 1 s\n"),
        (
            Refusal(grpc.StatusCode.UNAUTHENTICATED, "TOKEN_MISSING", "a token is wanted"),
            "error: a token is wanted; --token, before the command, sends it\n",
        ),
    ],
)
def test_a_refusal_is_one_line_and_status_1(run, fake, refusal, line):
    fake.script = refuse(refusal)
    shown = run("generate", "Hi")
    assert (shown.exit_code, shown.stderr) == (1, line)


@pytest.mark.parametrize("command", [("generate", "Hi"), ("chat",)])
def test_an_error_behind_text_begins_a_line_of_its_own(run, fake, command):
    def script(request):
        yield delta("get_metrics")
        raise invalid_argument([Violation("text", "no more")])

    fake.script = script
    shown = run(*command, stdin="Hi\n")
    assert (shown.exit_code, shown.stdout, shown.stderr) == (1, "get_metrics\n", "error: text: no more\n")


def test_no_server_is_one_line_that_says_how_to_start_one():
    shown = CliRunner().invoke(app, ["generate", "Hi", "--target", "127.0.0.1:1"])
    assert shown.exit_code == 1
    assert shown.stderr.startswith("error: no server answers; `pagewire up` starts one")
    assert shown.stderr.count("\n") == 1


def test_a_server_without_tls_that_is_asked_by_tls_is_one_line(target):
    command = [sys.executable, "-m", "pagewire", "--tls", "generate", "Hi", "--target", target]
    variables = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert ended.stderr.startswith("error: not let in by TLS")


def test_a_full_disk_is_one_line(target):
    command = [sys.executable, "-m", "pagewire", "generate", "Hi", "--target", target]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (1, "error: [Errno 28] No space left on device\n")


def test_the_rate_counts_tokens_after_each_sequences_first():
    outputs = (Output(0, "a"), Output(1, "b"))
    completion = Completion("r", outputs, Usage(5, 0, 12), Timings(0, 500, 1500, 0))
    assert terminal.tokens_per_second(completion) == 10.0
    one = Completion("r", outputs[:1], Usage(5, 0, 1), Timings(0, 500, 500, 0))
    assert terminal.tokens_per_second(one) is None
    assert terminal.summary(one) == "TTFT 500 ms, 1 tokens in 0.50 s (prompt of 5)"


# chat and the small ones


def test_chat_answers_each_line_and_remembers(run, fake):
    shown = run("chat", "--system", "Be brief.", stdin="one\n\ntwo\n")
    assert (shown.exit_code, shown.stdout) == (0, "Hello, world\nHello, world\n")
    said = [[(message.role, message.content) for message in request.chat.messages] for request in fake.requests]
    first = [("system", "Be brief."), ("user", "one")]
    assert said == [first, [*first, ("assistant", "Hello, world"), ("user", "two")]]


def test_chat_from_a_pipe_ends_with_an_error(run, fake):
    fake.script = refuse(unavailable("DRAINING", "the server drains"))
    shown = run("chat", stdin="one\ntwo\n")
    assert (shown.exit_code, {request.chat.messages[-1].content for request in fake.requests}) == (1, {"one"})


def test_chat_on_a_terminal_says_what_to_do_about_an_error_and_goes_on():
    keyboard, terminal_of_chat = os.openpty()
    os.write(keyboard, b"one\ntwo\n\x04")
    command = [sys.executable, "-m", "pagewire", "chat", "--target", "127.0.0.1:1"]
    ended = subprocess.run(command, stdin=terminal_of_chat, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr.count("error: no server answers; `pagewire up` starts one")) == (0, 2)


def test_tokenize_prints_ids(run):
    assert run("tokenize", "Hi").stdout == "[7, 8, 9]\n"


def test_health_is_an_exit_status(target):
    serves = CliRunner().invoke(app, ["health", target])
    assert (serves.exit_code, serves.stdout) == (0, "SERVING\n")
    unknown = CliRunner().invoke(app, ["health", target, "--service", "x.Y"])
    assert (unknown.exit_code, unknown.stdout) == (1, "no service 'x.Y'\n")
    nobody = CliRunner().invoke(app, ["health", "unix:/no/such/socket"])
    assert (nobody.exit_code, nobody.stdout) == (1, "no answer (UNAVAILABLE)\n")


@pytest.mark.parametrize("timeout", ["inf", "1e10", "1e300"])
def test_health_may_take_as_long_as_one_likes(target, timeout):
    assert CliRunner().invoke(app, ["health", target, "--timeout", timeout]).stdout == "SERVING\n"


@pytest.mark.parametrize("command", ["health", "generate Hi", "restart router"])
def test_a_timeout_is_a_number_of_seconds(command):
    shown = CliRunner().invoke(app, [*command.split(), "--timeout", "nan"])
    assert (shown.exit_code, "Invalid value for '--timeout'" in shown.stderr) == (2, True)


@pytest.mark.parametrize("module", ["asyncio", "pagewire.cli"])
def test_an_interrupt_among_the_imports_ends_a_command_without_a_word(module):
    interrupted = """if True:
        import os, signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background may not have
        from pagewire.__main__ import main

        module = sys.argv.pop()

        class Interrupter:
            def find_spec(self, name, *rest):
                if name == module:
                    os.kill(os.getpid(), signal.SIGINT)

        sys.meta_path.insert(0, Interrupter())
        main()
    """
    ended = subprocess.run([sys.executable, "-c", interrupted, "up", "--help", module], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")


def test_health_asks_the_server_that_the_environment_names(target, monkeypatch):
    monkeypatch.setenv("PAGEWIRE_CLIENT_TARGET", target)
    assert CliRunner().invoke(app, ["health"]).stdout == "SERVING\n"


def test_model_prints_a_folder(tmp_path):
    assert CliRunner().invoke(app, ["model", str(tmp_path)]).stdout == f"{tmp_path}\n"


@pytest.mark.parametrize("command", ["model", "up", "up --detach"])
def test_a_folder_that_cannot_be_made_is_one_line_with_its_name(command, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    monkeypatch.setenv("XDG_STATE_HOME", str(file))
    shown = CliRunner().invoke(app, command.split())
    assert (shown.exit_code, shown.stderr.count("\n"), str(file) in shown.stderr) == (1, 1, True)


def test_every_command_has_help():
    for name in (
        "up",
        "down",
        "status",
        "health",
        "model",
        "generate",
        "chat",
        "tokenize",
        "top",
        "explain",
        "bench",
        "demo",
    ):
        shown = CliRunner().invoke(app, [name, "--help"])
        assert shown.exit_code == 0, name


# bench


def record(at: float, times: list[float]) -> Record:
    return Record([1], 3, at, times)


def test_metrics_are_those_worked_out_by_hand():
    figures = bench.metrics([record(0.0, [0.1, 0.2, 0.3]), record(0.1, [0.3, 0.5])])
    assert figures == {
        "total_s": 0.5,
        "out_tok": 5,
        "want_tok": 6,
        "out_tok_s": 10.0,
        "decode_tok_s": 6.7,
        "ttft_mean_ms": 150.0,
        "ttft_p50_ms": 100.0,
        "ttft_p99_ms": 200.0,
        "tpot_mean_ms": 150.0,
        "tpot_p50_ms": 100.0,
        "tpot_p99_ms": 200.0,
        "itl_mean_ms": 133.33,
        "itl_p50_ms": 100.0,
        "itl_p99_ms": 200.0,
    }


def test_a_run_of_single_tokens_has_no_gaps_between_tokens():
    figures = bench.metrics([record(0.0, [0.5])])
    assert (figures["out_tok_s"], figures["decode_tok_s"], figures["tpot_mean_ms"], figures["itl_p99_ms"]) == (
        2,
        None,
        None,
        None,
    )


def test_a_request_without_tokens_is_an_error():
    with pytest.raises(BenchError, match="1 of 2 requests got no token"):
        bench.metrics([record(0.0, [0.5]), record(0.0, [])])


def test_a_percentile_is_the_value_at_the_nearest_rank():
    values = [float(value) for value in range(101)]
    assert [bench.percentile(values, p) for p in (0, 50, 99, 100)] == [0, 50, 99, 100]
    assert bench.percentile([3.0, 1.0, 2.0], 50) == 2.0


def workload() -> dict:
    def request(token: int, gap: float = 0.0) -> dict:
        return {"ids": [token], "text": "", "max_tokens": 3, "gap": gap}

    return {
        "w1": [[request(10)], [request(11)]],
        "w4": [[request(40, 0.1), request(41, 0.3)]],
        "warm": [[request(1), request(2)]],
    }


def test_arrivals_are_gaps_over_the_rate_in_open_loop_tests_only():
    assert [row.at for row in bench.records(workload(), "w4", 2.0, 0)] == pytest.approx([0.05, 0.2])
    assert [row.at for row in bench.records(workload(), "w1", 2.0, 0)] == [0.0]


def test_each_repetition_plays_its_own_variant():
    played = [bench.records(workload(), "w1", 1.0, repetition)[0].token_ids for repetition in range(3)]
    assert played == [[10], [11], [10]]


def test_bench_plays_prints_and_keeps_its_figures(run, fake, target, tmp_path):
    (tmp_path / "w.json").write_text(json.dumps(workload()))
    out = tmp_path / "out.json"
    options = ["--tests", "w1,w4", "--rate", "20", "--repeat", "2", "--memory-of", str(os.getpid()), "--json", str(out)]
    shown = run("bench", "--workload", str(tmp_path / "w.json"), *options)
    assert shown.exit_code == 0, shown.output
    for words in ("w1 run 2: ", "best of 2 runs each", "w4 at 20/s", "TTFT ms, mean / p50 / p99", "peak memory MB"):
        assert words in shown.stdout
    prompts = [list(request.token_ids.ids) for request in fake.requests]
    assert sorted(prompts[:2]) == [[1], [2]]
    assert prompts[2:] == [[10], [40], [41], [11], [40], [41]]
    assert all(
        request.stop.ignore_eos and request.output.token_ids and request.sampling.temperature == 0
        for request in fake.requests
    )
    report = json.loads(out.read_text())
    assert datetime.fromisoformat(report["date"]).tzinfo is not None
    assert (report["target"], report["model"]["model"]) == (target, "fake")
    assert {"cpu", "cpus"} <= report["host"].keys()
    assert [(row["test"], row["repetition"], row["rate"]) for row in report["runs"]] == [
        ("w1", 0, None),
        ("w4", 0, 20.0),
        ("w1", 1, None),
        ("w4", 1, 20.0),
    ]
    assert all(row["metrics"]["out_tok"] == row["metrics"]["want_tok"] and row["rss_mb"] > 0 for row in report["runs"])
    # The second request of w4 arrives 20 ms after the first; its first token is counted from there.
    assert report["runs"][1]["metrics"]["total_s"] >= 0.015


def test_bench_ends_with_the_error_of_a_request(run, fake, tmp_path):
    (tmp_path / "w.json").write_text(json.dumps(workload()))
    fake.script = refuse(unavailable("LOST", "the worker is lost"))
    shown = run("bench", "--workload", str(tmp_path / "w.json"), "--tests", "w1")
    assert (shown.exit_code, "the worker is lost" in shown.stderr) == (1, True)


@pytest.mark.parametrize(
    ("text", "tests", "words"),
    [
        ("[]", "w1", "is no workload"),
        ("{", "w1", "is no workload"),
        ('{"w1": [[{"ids": []}]]}', "w1", "a request of w1 is not like"),
        ('{"w1": [[{"ids": [1], "max_tokens": "4", "gap": 0}]]}', "w1", 'not like {"ids": [...], "max_tokens": N'),
        ('{"w4": [[{"ids": [1], "max_tokens": 4, "gap": null}]]}', "w4", '"gap": null}'),
        ('{"w4": [[{"ids": [1], "max_tokens": 4, "gap": Infinity}]]}', "w4", '"gap": Infinity}'),
        ('{"w4": [[{"ids": [1], "max_tokens": 4, "gap": -1}]]}', "w4", '"gap": -1}'),
        ('{"w1": 5}', "w1", "is no workload"),
        ('{"w1": [[]]}', "w1", "a variant of w1 has no request"),
        ('{"w1": []}', "w1", "no test 'w1'"),
        (json.dumps(workload()), "w9", "no test 'w9'; it has w1, w4\n"),
    ],
)
def test_a_workload_that_cannot_be_played_is_one_line(run, tmp_path, text, tests, words):
    (tmp_path / "w.json").write_text(text)
    shown = run("bench", "--workload", str(tmp_path / "w.json"), "--tests", tests)
    assert (shown.exit_code, words in shown.stderr) == (1, True), shown.stderr
    assert shown.stderr.count("\n") == 1


def test_a_folder_for_figures_and_a_process_that_is_not_there_are_errors_before_anything_is_played(run, fake, tmp_path):
    (tmp_path / "w.json").write_text(json.dumps(workload()))
    shown = run("bench", "--workload", str(tmp_path / "w.json"), "--json", str(tmp_path))
    assert (shown.exit_code, "--json" in shown.stderr) == (2, True), shown.stderr
    ended = subprocess.Popen(["true"])
    ended.wait()
    shown = run("bench", "--workload", str(tmp_path / "w.json"), "--memory-of", str(ended.pid))
    assert (shown.exit_code, shown.stderr) == (1, f"error: --memory-of {ended.pid}: there is no such process\n")
    assert not fake.requests


def test_bench_has_the_access_that_its_server_asks_for(fake, tmp_path):
    (tmp_path / "w.json").write_text(json.dumps(workload()))
    authority = Authority(tmp_path)
    with serving(fake, tls=authority.server()) as target:
        command = ["bench", "--workload", str(tmp_path / "w.json"), "--tests", "w1", "--repeat", "1"]
        shown = CliRunner().invoke(app, ["--ca", str(authority.ca), *command, "--target", target])
    assert shown.exit_code == 0, shown.output


def test_bench_measures_a_server_on_a_socket_from_a_machine_without_torch(fake, tmp_path, monkeypatch):
    def version(name):
        if name == "torch":
            raise metadata.PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    (tmp_path / "w.json").write_text(json.dumps(workload()))
    options = ["--tests", "w1", "--repeat", "1", "--json", str(tmp_path / "x")]
    with serving(fake, f"unix:{tmp_path}/socket") as target:
        shown = CliRunner().invoke(app, ["bench", "--workload", str(tmp_path / "w.json"), *options, "--target", target])
    assert shown.exit_code == 0, shown.output
    report = json.loads((tmp_path / "x").read_text())
    assert (report["versions"]["pagewire"], report["versions"]["torch"]) == ("1.0", None)
    assert report["runs"][0]["rss_mb"] is None


@pytest.mark.parametrize("host", ["127.0.0.1", "elsewhere"])
def test_bench_tells_the_memory_of_the_local_cluster_only_if_that_is_the_one_it_measures(run, target, tmp_path, host):
    (tmp_path / "w.json").write_text(json.dumps(workload()))
    me, port, gone = os.getpid(), target.rpartition(":")[2], str(tmp_path / "gone")
    started, pids = start_ticks(me), {"worker": me}
    state.save(ClusterState(me, started, int(port), f"{host}:{port}", "", gone, None, 1.0, {}, pids, True))
    options = ["--tests", "w1", "--repeat", "1", "--json", str(tmp_path / "x")]
    assert run("bench", "--workload", str(tmp_path / "w.json"), *options).exit_code == 0
    (row,) = json.loads((tmp_path / "x").read_text())["runs"]
    if host == "elsewhere":
        assert row["rss_mb"] is None
    else:
        assert row["rss_mb"] == pytest.approx(peak_resident_bytes([me]) / 2**20, rel=0.2)


def test_figures_that_a_full_disk_does_not_take_are_shown_all_the_same(run, tmp_path):
    (tmp_path / "w.json").write_text(json.dumps(workload()))
    shown = run("bench", "--workload", str(tmp_path / "w.json"), "--tests", "w1", "--json", "/dev/full")
    assert (shown.exit_code, shown.stderr) == (1, "error: --json /dev/full: No space left on device\n")
    assert "best of 3 runs each" in shown.stdout


def test_a_file_for_figures_that_can_not_be_written_is_an_error_before_anything_is_played(run, fake, tmp_path):
    (tmp_path / "w.json").write_text(json.dumps(workload()))
    shown = run("bench", "--workload", str(tmp_path / "w.json"), "--json", str(tmp_path / "nowhere" / "x.json"))
    assert (shown.exit_code, f"there is no folder {tmp_path / 'nowhere'}" in shown.stderr) == (1, True)
    assert not fake.requests


def test_the_table_shows_the_run_of_the_highest_rate():
    rows = [Row("w1", i, None, None, {"out_tok_s": rate}) for i, rate in enumerate((5.0, 9.0, 7.0))]
    assert bench_report.best(rows)["w1"].repetition == 1
