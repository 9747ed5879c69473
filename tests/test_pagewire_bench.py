"""What `pagewire bench` makes of the times of tokens, by hand."""

import pytest

from pagewire.bench import BenchError, Record, metrics


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
