"""Streams where there is no device of its own: what is given is done, and marks have the times of it."""

import torch

from worker.streams import HostStreams, streams_of


def test_a_cpu_has_passed_every_mark_and_does_at_once_what_is_beside():
    streams = streams_of(torch.device("cpu"))
    assert isinstance(streams, HostStreams)
    done = []
    before = streams.mark()
    begun, ended = streams.beside(lambda: done.append(streams.mark()))
    assert len(done) == 1
    assert before.is_passed
    assert ended.is_passed
    assert 0 <= begun.ms_since(before) <= done[0].ms_since(before) <= ended.ms_since(before)
    ended.wait()
    streams.wait_for(ended)
