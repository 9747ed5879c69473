"""What ranks in other processes tell the front: what it takes for an answer, and whose word counts when several end."""

from multiprocessing import Pipe

import pytest

from worker.checkpoint import ModelError
from worker.executor.executor import RankLost
from worker.executor.told import NumberedAnswer, read_outcome, tag_end, tag_outcome, wait_for_infos
from worker.inputs import MalformedStep


def told(*messages):
    """What the front hears from ranks that end, each with its message or without one."""
    pipes = [Pipe() for _ in messages]
    for (_, rank), message in zip(pipes, messages, strict=True):
        if message is not None:
            rank.send_bytes(message)
        rank.close()
    wait_for_infos([front for front, _ in pipes])


REFUSAL, FAILURE = tag_end(ModelError("no memory")), tag_end(RuntimeError("rank 1 has closed its socket"))


@pytest.mark.parametrize("other", [None, FAILURE], ids=["in silence", "with an error"])
def test_a_rank_that_ends_since_another_one_cannot_load_does_not_hide_why(other):
    for messages in ([other, REFUSAL], [REFUSAL, other]):
        with pytest.raises(ModelError, match="no memory"):
            told(*messages)


def test_a_rank_that_ends_in_silence_does_not_hide_why_another_one_has_failed():
    for rank, messages in enumerate(([FAILURE, None], [None, FAILURE])):
        with pytest.raises(RankLost, match=f"rank {rank} failed: RuntimeError: rank 1 has closed its socket"):
            told(*messages)


def test_of_a_malformed_step_the_whole_description_is_told():
    error = read_outcome(tag_outcome(MalformedStep("token_ids", "line by line:\n1\n2")))
    assert (error.field, error.description) == ("token_ids", "line by line:\n1\n2")


def test_to_ask_whether_an_answer_is_there_does_not_wait_for_it():
    assert not NumberedAnswer(pytest.fail, 1).is_finished
