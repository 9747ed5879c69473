"""What `pagewire bench` makes of the times of tokens, by hand."""

import io
import json

import pytest
from pagewire_fakes import FakeGeneration, delta, last, serving
from rich.console import Console

from pagewire import bench, bench_report
from pagewire.bench import BenchError, Record, Row, metrics
from pagewire.errors import RequestError
from protos.errors import unavailable


def record(at: float, *times: float) -> Record:
    return Record(token_ids=[1], max_tokens=len(times), at=at, times=list(times))


def test_times_count_from_a_requests_arrival_and_rates_over_the_whole_run():
    figures = metrics([record(1.0, 1.5, 2.5, 3.5), record(2.0, 3.0, 5.0)])
    assert figures["total_s"] == 4.0, "from the first arrival to the last token"
    assert (figures["out_tok"], figures["want_tok"], figures["out_tok_s"]) == (5, 5, 1.2)
    assert figures["ttft_mean_ms"] == 750
    assert figures["tpot_mean_ms"] == 1500, "one second in the first request, two in the other"
    assert figures["itl_mean_ms"] == 1333.33, "1, 1 and 2 seconds"
    assert figures["decode_tok_s"] == 0.7


def test_of_a_hundred_and_one_the_slowest_is_behind_the_99th_percentile():
    figures = metrics([record(0.0, float(second)) for second in range(1, 102)])
    assert (figures["ttft_p50_ms"], figures["ttft_p99_ms"]) == (51_000, 100_000)
    assert figures["itl_p99_ms"] is None, "one token each"


def test_a_request_without_a_token_is_an_error():
    with pytest.raises(BenchError, match="1 of 2 requests got no token"):
        metrics([record(0.0, 1.0), record(0.0)])


def test_tokens_that_come_all_at_once_have_no_rate():
    figures = metrics([record(0.0, 0.5, 0.5)])
    assert (figures["out_tok_s"], figures["decode_tok_s"], figures["tpot_mean_ms"]) == (4.0, None, 0.0)


async def test_every_token_of_a_delta_counts_in_the_figures_and_in_the_progress():
    fake, told, rows = FakeGeneration(), [], []
    fake.script = lambda request: [delta("ab", token_ids=[1, 2]), last(delta("c", token_ids=[3]))]
    workload = {"w1": [[{"ids": [7], "max_tokens": 3, "gap": 0}] * 2]}
    with serving(fake) as target:
        await bench.run(
            target,
            workload,
            ["w1"],
            rate=1.0,
            repetitions=1,
            rss_mb=lambda: None,
            on_row=rows.append,
            on_start=lambda *run: told.append(run),
            on_tokens=told.append,
        )
    assert told[0] == ("w1", 0, 6)
    assert sorted(told[1:]) == [1, 1, 2, 2]
    (row,) = rows
    assert (row.metrics["out_tok"], row.metrics["want_tok"]) == (6, 6)


def test_figures_of_runs_before_one_that_fails_are_kept(tmp_path):
    fake = FakeGeneration()

    def script(request):
        if len(fake.requests) > 2:
            raise unavailable("LOST", "the worker is lost")
        yield last(delta("ab", token_ids=[1, 2]))

    fake.script = script
    workload, kept = tmp_path / "w.json", tmp_path / "figures.json"
    workload.write_text(json.dumps({"w1": [[{"ids": [7], "max_tokens": 2, "gap": 0}]]}))
    with serving(fake) as target, pytest.raises(RequestError, match="the worker is lost"):
        bench_report.run(
            target,
            workload,
            ["w1"],
            rate=1.0,
            repetitions=4,
            memory_of=None,
            json_file=kept,
            console=Console(file=io.StringIO()),
        )
    assert [row["repetition"] for row in json.loads(kept.read_text())["runs"]] == [0, 1]


def test_a_file_that_cannot_be_read_is_no_workload(tmp_path):
    with pytest.raises(BenchError, match=r"is no workload: .*No such file"):
        bench.load(tmp_path / "missing.json")


def test_the_table_shows_each_figure_in_its_row_and_a_dash_for_what_is_not_known():
    figures = {"out_tok_s": 1.0, "decode_tok_s": 2.0, "total_s": 3.0, "out_tok": 4.0}
    figures |= {"ttft_mean_ms": 5.0, "ttft_p50_ms": 6.0, "ttft_p99_ms": 7.0}
    figures |= {"tpot_mean_ms": 8.0, "tpot_p50_ms": 9.0, "tpot_p99_ms": 10.0}
    figures |= {"itl_mean_ms": 11.0, "itl_p50_ms": 12.0, "itl_p99_ms": 13.0}
    of_single_tokens = metrics([record(0.0, 0.5)])
    console = Console(file=io.StringIO(), record=True, width=120)
    console.print(bench_report.table([Row("w1", 0, None, 12, figures), Row("w4", 0, 4.2, None, of_single_tokens)]))
    assert [" ".join(line.split()) for line in console.export_text().splitlines()] == [
        "best of 1 run each",
        "w1 w4 at 4.2/s",
        "output tok/s 1.0 2.0",
        "decode tok/s of a stream 2.0 -",
        "total s 3.00 0.50",
        "TTFT ms, mean / p50 / p99 5 / 6 / 7 500 / 500 / 500",
        "TPOT ms, mean / p50 / p99 8.0 / 9.0 / 10.0 - / - / -",
        "ITL ms, mean / p50 / p99 11.0 / 12.0 / 13.0 - / - / -",
        "tokens 4 1",
        "peak memory MB 12 -",
    ]
