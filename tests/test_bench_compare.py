"""The comparison with the peers: its prompts, its order of runs, its arithmetic, and what it shows."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from compare_fakes import SMALL, FakeEngine, RestlessComparison, run_of, variant

from bench.compare import plot, variants, workload
from bench.compare.engine import EngineError
from bench.compare.install import Peers
from bench.compare.recipes import RECIPES
from bench.compare.rounds import GOAL_RATE, RATES, Comparison, Life, RateSearch, Results, Run
from bench.compare.rows import ROWS, Goal, Row, Spread, compare
from bench.compare.variants import OURS, VARIANTS, Precision, Variant, prepare, select
from bench.control_plane import write_byte_tokenizer
from pagewire.bench import Record, metrics


def comparison(
    engines: list[Variant], log: list, *, tests=("w1", "w2"), num_rounds=2, num_probes=0, **how
) -> Comparison:
    return RestlessComparison(
        engines,
        lambda each: FakeEngine(each.name, log, **how),
        SMALL,
        tests,
        num_rounds=num_rounds,
        num_probes=num_probes,
    )


# The workload


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return workload.make(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_the_workload_is_as_documented_and_the_same_each_time(prompts, tmp_path):
    assert prompts == workload.make(write_byte_tokenizer(tmp_path))
    assert [len(prompts[test]) for test in workload.NAMES] == [workload.VARIANTS] * 4
    (w1,), w2, w3, w4 = (prompts[test][0] for test in workload.NAMES)
    assert (len(w1["ids"]), w1["max_tokens"]) == (128, 128)
    assert len(w2) == 32
    assert all(64 <= len(row["ids"]) <= 256 and row["max_tokens"] == 128 for row in w2)
    assert len({tuple(row["ids"][:512]) for row in w3}) == 1
    assert len({tuple(row["ids"]) for row in w3}) == 32
    assert len(w4) == 64
    assert all(16 <= len(row["ids"]) <= 1024 and 8 <= row["max_tokens"] <= 512 and row["gap"] > 0 for row in w4)


def test_two_runs_share_no_prefix_and_two_engines_get_the_same_prompts(prompts):
    first, second = (workload.stamped(prompts, "w3", 1.0, 0, stamp) for stamp in (1, 2))
    again = workload.stamped(prompts, "w3", 1.0, 0, 1)
    assert [row.token_ids for row in first] == [row.token_ids for row in again]
    assert {row.token_ids[0] for row in first}.isdisjoint({row.token_ids[0] for row in second})
    assert [row.token_ids[1:] for row in first] == [row.token_ids[1:] for row in second]
    assert len({tuple(row.token_ids[:512]) for row in first}) == 1, "the prefix that they share in a run stays"


# The order of runs


def test_engines_take_turns_within_each_test_on_prompts_that_no_other_run_has():
    log = []
    comparison([variant("a"), variant("b")], log).run()
    plays = [(name, body, stamp) for kind, name, body, stamp in (x for x in log if x[0] == "play") if body[0]]
    bodies = [((2, 3),), ((5,), (5,))] * 2
    assert [(name, body) for name, body, _ in plays] == [(name, body) for body in bodies for name in "ab"]
    stamps = [stamp for _, _, stamp in plays]
    assert stamps[0::2] == stamps[1::2], "both engines get the same"
    assert len(set(stamps)) == 4


def test_engines_start_afresh_in_each_round_and_one_kind_after_the_other():
    log = []
    engines = [variant("a"), variant("small", precision=Precision.QUANTIZED, tests=("w1",)), variant("b")]
    playing = comparison(engines, log)
    playing.run()
    steps = [entry[:2] for entry in log if entry[0] != "play"]
    one_round = [("start", "a"), ("start", "b"), ("close", "b"), ("close", "a"), ("start", "small"), ("close", "small")]
    assert steps == 2 * one_round
    tests = {(run.engine, run.test) for run in playing.results.runs}
    assert tests == {("a", "w1"), ("a", "w2"), ("b", "w1"), ("b", "w2"), ("small", "w1")}
    assert [life.first_answer_s for life in playing.results.lives] == [2.5] * 6
    assert [life.peak_bytes for life in playing.results.lives] == [3_000_000] * 6


def test_engines_are_awake_only_while_they_play():
    engines = []

    def start(each: Variant) -> FakeEngine:
        engines.append(FakeEngine(each.name, []))
        assert not any(engine.awake for engine in engines[:-1])
        return engines[-1]

    def check(run: Run) -> None:
        assert not any(engine.awake for engine in engines)

    names = [variant("a"), variant("b")]
    RestlessComparison(names, start, SMALL, ["w1"], num_rounds=1, num_probes=0, on_run=check).run()
    assert len(engines) == 2


def test_an_engine_rests_awake_after_its_first_answers_and_before_each_run(monkeypatch):
    engines, rests = [], []
    monkeypatch.setattr("bench.compare.rounds.time.sleep", lambda seconds: rests.append((seconds, engines[-1].awake)))

    def start(each: Variant) -> FakeEngine:
        engines.append(FakeEngine(each.name, []))
        return engines[-1]

    Comparison([variant("a")], start, SMALL, ["w1", "w2"], num_rounds=1, num_probes=0, settle_s=0.5, start_s=5.0).run()
    assert rests == [(5.0, True), (0.5, True), (0.5, True)]


def test_an_engine_that_fails_is_left_out_and_the_others_go_on():
    log = []
    playing = comparison([variant("bad"), variant("good")], log, fails_in=("bad",))
    playing.run()
    assert playing.results.left_out == {"bad": "round 1, w2: out of luck"}
    assert [(run.engine, run.test, run.round) for run in playing.results.runs] == [
        ("bad", "w1", 0),
        ("good", "w1", 0),
        ("good", "w2", 0),
        ("good", "w1", 1),
        ("good", "w2", 1),
    ]
    assert log.count(("start", "bad")) == log.count(("close", "bad")) == 1


def test_an_engine_that_does_not_start_is_left_out():
    def start(each: Variant) -> FakeEngine:
        if each.name == "bad":
            raise EngineError("no such program")
        return FakeEngine(each.name, [])

    playing = RestlessComparison([variant("bad"), variant("good")], start, SMALL, ["w1"], num_rounds=2, num_probes=0)
    playing.run()
    assert playing.results.left_out == {"bad": "no such program"}
    assert [run.engine for run in playing.results.runs] == ["good", "good"]


def test_an_interruption_ends_all_engines_and_keeps_what_was_found():
    log = []

    def stop(run: Run) -> None:
        if run.engine == "b":
            raise KeyboardInterrupt

    playing = RestlessComparison(
        [variant("a"), variant("b")],
        lambda each: FakeEngine(each.name, log),
        SMALL,
        ["w1"],
        num_rounds=2,
        num_probes=0,
        on_run=stop,
    )
    with pytest.raises(KeyboardInterrupt):
        playing.run()
    assert {("close", "a"), ("close", "b")} <= {entry[:2] for entry in log}
    assert [run.engine for run in playing.results.runs] == ["a", "b"]


def test_the_steps_that_are_announced_are_those_that_are_taken():
    steps = []
    playing = comparison([variant("a"), variant("b", tests=("w1", "w4"))], [], tests=("w1", "w4"))
    playing._on_step = steps.append
    playing.run()
    assert len(steps) == playing.most_steps == 2 * (2 + 2 + 2 * len(RATES))
    assert "round 2 of 2: b plays w4 at 4.2/s" in steps


# The search for the highest rate


@pytest.mark.parametrize("capacity", [0.6, 1.2, 2.0, 2.2, 3.9, 4.3, 7.0, 12.0, 16.0])
def test_the_search_finds_the_highest_rate_within_a_tenth(capacity):
    search = RateSearch({rate: rate <= capacity for rate in RATES}, lowest=0.5, highest=16.8, num_probes=9)
    while (rate := search.next_rate) is not None:
        search.take(rate, rate <= capacity)
    assert search.best <= capacity <= search.best * 1.1


def test_the_search_ends_when_its_probes_are_used_up():
    search = RateSearch({2.1: True, 4.2: True}, lowest=0.5, highest=16.8, num_probes=2)
    probes = []
    while (rate := search.next_rate) is not None:
        probes.append(rate)
        search.take(rate, kept=rate < 5)
    assert probes == [8.4, 5.94]
    assert search.best == 4.2


def test_the_highest_rate_of_a_search_is_played_before_it_counts():
    for capacity, wanted in ((20.0, [8.4, 16.8]), (15.0, [8.4, 16.8, 11.88, 14.13])):
        search = RateSearch({2.1: True, 4.2: True}, lowest=0.5, highest=16.8, num_probes=4)
        probes = []
        while (rate := search.next_rate) is not None:
            probes.append(rate)
            search.take(rate, kept=rate <= capacity)
        assert probes == wanted
        assert search.best == max(rate for rate in wanted if rate <= capacity)


def test_the_search_finds_nothing_if_no_rate_down_to_the_lowest_is_within_the_limit():
    search = RateSearch({2.1: False, 4.2: False}, lowest=0.5, highest=16.8, num_probes=4)
    probes = []
    while (rate := search.next_rate) is not None:
        probes.append(rate)
        search.take(rate, kept=False)
    assert probes == [1.05, 0.525]
    assert search.best is None


def test_a_round_notes_the_highest_rate_of_each_engine():
    log = []
    playing = comparison([variant("a"), variant("b")], log, tests=("w4",), num_rounds=1, num_probes=9, capacity=7.0)
    playing.run()
    for life in playing.results.lives:
        assert 7.0 / 1.1 <= life.best_rate <= 7.0
    searched = [(run.engine, run.rate) for run in playing.results.runs if run.search]
    assert len(searched) > 2
    assert [name for name, _ in searched] == ["a", "b"] * (len(searched) // 2), "one probe of each in turn"
    assert [run.rate for run in playing.results.runs if not run.search] == [2.1, 2.1, 4.2, 4.2]


# Figures


def row(**changes) -> Row:
    def find(results: Results, name: str) -> dict[int, float]:
        return {run.round: run.metrics["out_tok_s"] for run in results.runs if run.engine == name}

    return Row("tokens", "tok/s", find, **({"goal": Goal(1.5)} | changes))


def results_of(**engines: list[float]) -> Results:
    runs = [run_of(name, i, "w1", out_tok_s=x) for name, values in engines.items() for i, x in enumerate(values)]
    return Results(runs)


ENGINES = [variant("ours", OURS), variant("slow"), variant("fast")]


def test_ratios_are_within_a_round_and_to_the_peer_with_the_best_median():
    compared = compare(row(), results_of(ours=[30, 60, 40], slow=[10, 10, 99], fast=[20, 30, 25]), ENGINES, ["w1"])
    assert (compared.ours, compared.best_peer) == ("ours", "fast")
    assert compared.ratio == Spread(median=1.6, low=1.5, high=2.0)
    assert compared.engines["ours"] == Spread(40, 30, 60)
    assert compared.met


def test_our_figure_is_that_of_our_default_and_not_of_our_best_variant():
    engines = [variant("ours", OURS), variant("ours-plain", OURS), variant("fast")]
    compared = compare(row(), results_of(ours=[30], **{"ours-plain": [60]}, fast=[20]), engines, ["w1"])
    assert (compared.ours, compared.ratio.median) == ("ours", 1.5)


def test_the_best_is_the_least_if_less_is_better():
    less = row(more_is_better=False, goal=Goal(0.6))
    compared = compare(less, results_of(ours=[9, 9, 9], slow=[20, 20, 20], fast=[10, 10, 10]), ENGINES, ["w1"])
    assert compared.best_peer == "fast"
    assert compared.ratio == Spread(0.9, 0.9, 0.9)
    assert not compared.met


def test_an_absolute_goal_is_for_our_own_figure():
    absolute = row(more_is_better=False, goal=Goal(12, absolute=True))
    assert compare(absolute, results_of(ours=[9, 11, 13], fast=[1, 1, 1]), ENGINES, ["w1"]).met
    assert compare(absolute, results_of(ours=[13, 13, 9]), ENGINES, ["w1"]).met is False


def test_a_figure_that_no_engine_has_is_missing():
    compared = compare(row(), results_of(fast=[1, 2]), ENGINES, ["w1"])
    assert (compared.ours, compared.best_peer, compared.ratio, compared.met) == (None, "fast", None, None)
    assert compare(row(), Results(), ENGINES, ["w1"]).engines == {}


def test_engines_are_compared_with_those_of_their_precision_that_play_the_same_tests():
    engines = [*ENGINES, variant("small", precision=Precision.QUANTIZED), variant("part", tests=("w1",))]
    found = results_of(ours=[1], slow=[1], fast=[1], small=[1], part=[1])
    assert compare(row(), found, engines, ["w1", "w2"]).engines.keys() == {"ours", "slow", "fast", "part"}
    whole = row(tests=("w1", "w2"))
    assert compare(whole, found, engines, ["w1", "w2"]).engines.keys() == {"ours", "slow", "fast"}
    assert compare(whole, found, engines, ["w1"]).engines.keys() == {"ours", "slow", "fast", "part"}
    assert compare(row(precision=Precision.QUANTIZED), found, engines, ["w1"]).engines.keys() == {"small"}


def test_each_row_finds_its_figure():
    figures = metrics([Record([1], 3, at=0.0, times=[0.1, 0.2, 0.4])])
    results = Results(
        [Run(0, OURS, test, None, False, figures, 0.0, [7]) for test in ("w1", "w2", "w3")]
        + [Run(0, OURS, "w4", GOAL_RATE, search, figures | {"ttft_p99_ms": p99}, 0.0, [7])
           for search, p99 in ((False, 100.0), (True, 999.0))],
        [Life(0, OURS, "1", first_answer_s=2.0, peak_bytes=1_100_000_000, best_rate=8.4)],
    )  # fmt: skip
    compared = [compare(each, results, [variant(OURS, OURS)], workload.NAMES) for each in ROWS]
    found = {each.row.name: each.engines[OURS].median for each in compared if each.engines}
    assert found == {
        "W1 one stream": round(2 / 0.3, 1),
        "W2 32 at once": round(3 / 0.4, 1),
        "W2 mean TTFT": 100,
        "W3 shared prefix": round(3 / 0.4, 1),
        "W4 at 4.2/s, TTFT p99": 100,
        "W4 at 4.2/s, TPOT p50": 150,
        "W4 highest rate, TPOT p50 < 50 ms": 8.4,
        "first answer after start": 2.0,
        "peak memory over the tests": 1100,
    }
    assert [each.met for each in compared if each.row.goal.absolute] == [True, True]


# Which engines


def test_the_name_of_a_peer_selects_all_its_variants_and_that_of_a_variant_only_itself():
    names = [each.name for each in select([OURS, "openvino"], ["w1", "w2"])]
    assert names == [
        OURS,
        "pagewire-plain",
        "openvino",
        "openvino-lookup",
        "pagewire-int8",
        "pagewire-int8-plain",
        "pagewire-int4",
        "openvino-int8",
        "openvino-int8-lookup",
    ]
    assert [each.name for each in select(["llamacpp-q8_0"], ["w1"])] == ["llamacpp-q8_0"]


def test_variants_without_a_chosen_test_do_not_play():
    names = [each.name for each in select(["openvino", "transformers"], ["w4"])]
    assert names == ["openvino", "openvino-lookup", "transformers-continuous"]


@pytest.mark.parametrize("names, tests", [(["vlm"], ["w1"]), ([OURS], ["w9"])])
def test_an_unknown_name_is_refused(names, tests):
    with pytest.raises(ValueError, match=r"vlm|w9"):
        select(names, tests)


def test_our_bytecode_is_kept_like_that_of_peers(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    ours = next(variant for variant in VARIANTS if variant.peer == OURS)
    assert "PYTHONDONTWRITEBYTECODE" not in prepare(ours, tmp_path, Peers(tmp_path, print), tmp_path).environment


def test_every_variant_has_a_driver_and_a_recipe():
    for each in VARIANTS:
        assert (Path(variants.__file__).parent / "drivers" / f"drive_{each.peer}.py").is_file()
        assert each.peer in RECIPES or each.peer == OURS


def test_a_peer_that_looks_drafts_up_is_otherwise_the_same():
    by_name = {each.name: each for each in VARIANTS}
    looking_up = [each for each in VARIANTS if each.name.endswith("-lookup")]
    assert {each.peer for each in looking_up} == {each.peer for each in VARIANTS} - {OURS}
    for each in looking_up:
        plain = by_name[each.name.removesuffix("-lookup")]
        drafts = {"lookup": each.options["lookup"]}
        assert each == replace(plain, name=each.name, options=plain.options | drafts, tests=each.tests)
        assert set(each.tests) <= set(plain.tests)


# The picture


def test_the_picture_shows_the_median_at_each_rate():
    speeds = [(4.2, 10, 5.0), (4.2, 30, 7.0), (4.2, 20, 9.0), (2.1, 8, 4.0)]
    runs = [run_of("a", i, "w4", rate, out_tok_s=x, tpot_p50_ms=y) for i, (rate, x, y) in enumerate(speeds)]
    runs.append(run_of("a", 0, "w1", out_tok_s=99.0, tpot_p50_ms=1.0))
    assert plot.points(runs, "a", "tpot_p50_ms") == [(2.1, 8, 4.0), (4.2, 20, 7.0)]


def test_the_picture_is_drawn_with_a_line_of_its_own_for_each_engine(tmp_path):
    pytest.importorskip("matplotlib")
    figures = {"out_tok_s": 10.0, "tpot_p50_ms": 5.0, "ttft_p99_ms": 50.0}
    names = [each.name for each in VARIANTS if "w4" in each.tests]
    runs = [run_of(engine, 0, "w4", rate, **figures) for engine in names for rate in RATES]
    plot.draw(runs, tmp_path / "w4.svg")
    drawn = (tmp_path / "w4.svg").read_text()
    assert all(word in drawn for word in (*names, "output tokens/s", "TTFT p99"))
    lines = re.findall(r"fill: none; (?:stroke-dasharray: ([^;]+);[^\"]*? )?stroke: (#\w+); stroke-width: 1.2", drawn)
    assert len(set(lines)) == len(names)
