"""Bounding many waits with one timer, in a time that passes at once."""

import asyncio

import pytest

from protos.patience import Patience


@pytest.fixture
def run():
    """Runs a coroutine on a loop whose clock jumps to the next timer instead of waiting for it."""
    loop = asyncio.new_event_loop()
    now, select = 0.0, loop._selector.select

    def jump(timeout):
        nonlocal now
        now += timeout or 0.0
        return select(0)

    loop.time = lambda: now
    loop._selector.select = jump
    yield loop.run_until_complete
    loop.close()


async def waits(limit_s, *lasting_s, between_s=0.0):
    """One wait after the other; gives the time at the end."""
    async with Patience(limit_s) as patience:
        for seconds in lasting_s:
            patience.begin()
            await asyncio.sleep(seconds)
            patience.end()
            await asyncio.sleep(between_s)
    return asyncio.get_running_loop().time()


def test_a_wait_that_lasts_too_long_ends_the_block_when_its_time_is_over(run):
    async def late():
        with pytest.raises(TimeoutError):
            await waits(5, 60)
        return asyncio.get_running_loop().time()

    assert run(late()) == 5


def test_each_wait_has_all_its_time_and_no_more(run):
    async def late():
        with pytest.raises(TimeoutError):
            await waits(5, 4, 4, 4, 6)
        return asyncio.get_running_loop().time()

    assert run(waits(5, 4, 4, 4)) == 12
    assert run(late()) == 12 + 17


def test_what_is_not_waited_for_may_last(run):
    assert run(waits(5, 1, 1, between_s=60)) == 122


def test_a_thousand_waits_set_one_timer(run, monkeypatch):
    async def watched():
        loop, timers = asyncio.get_running_loop(), []
        call_later = loop.call_later
        monkeypatch.setattr(loop, "call_later", lambda *args: timers.append(args) or call_later(*args))
        async with Patience(5) as patience:
            for _ in range(1000):
                patience.begin()
                patience.end()
            return len(timers)

    assert run(watched()) == 1


def test_a_task_that_is_cancelled_is_cancelled_and_not_out_of_time(run):
    async def cancelled():
        task = asyncio.create_task(waits(5, 4))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancelled())
