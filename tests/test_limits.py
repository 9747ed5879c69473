"""Limits of tenants by a clock of the test: requests at once, tokens a minute, and honest delays."""

import grpc
import pytest

from protos.errors import Refusal
from router.limits import TenantLimits, _Account
from router.tenants import Tenant


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def limits(clock):
    return TenantLimits(clock)


def test_a_tenant_has_so_many_requests_at_once_and_others_have_theirs(limits):
    acme, other = Tenant("acme", max_requests=2), Tenant("other", max_requests=2)
    permits = [limits.enter(acme), limits.enter(acme)]
    with pytest.raises(Refusal, match="tenant 'acme' has 2 live requests at this router, of at most 2") as info:
        limits.enter(acme)
    assert (info.value.code, info.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_REQUESTS_EXHAUSTED")
    limits.enter(other)
    limits.leave(permits[0], 1)
    limits.enter(acme)


def test_the_delay_for_one_more_request_is_what_requests_have_taken_over_how_many_run(limits, clock):
    acme = Tenant("acme", max_requests=2)
    for _ in range(100):
        permit = limits.enter(acme)
        clock.now += 4
        limits.leave(permit, 1)
    limits.enter(acme), limits.enter(acme)
    with pytest.raises(Refusal) as info:
        limits.enter(acme)
    assert info.value.retry_delay_ms == pytest.approx(2000, abs=2)


def test_prompts_are_charged_at_once_outputs_at_the_end_and_the_delay_is_when_enough_has_flowed_in(limits, clock):
    acme = Tenant("acme", tokens_per_minute=60)
    permit = limits.enter(acme)
    limits.charge_prompt(permit, 40)
    limits.leave(permit, 50)  # 30 are owed
    refused = limits.enter(acme)
    with pytest.raises(Refusal, match="60 tokens a minute at this router; the prompt's 10 need 40 more") as info:
        limits.charge_prompt(refused, 10)
    assert (info.value.reason, info.value.retry_delay_ms) == ("TENANT_TOKENS_EXHAUSTED", 40_000)
    clock.now += 39.9
    with pytest.raises(Refusal):
        limits.charge_prompt(refused, 10)
    clock.now += 0.2
    limits.charge_prompt(refused, 10)


def test_what_flows_into_a_full_bucket_while_a_request_runs_pays_for_no_output(limits, clock):
    acme = Tenant("acme", tokens_per_minute=60)
    permit = limits.enter(acme)
    clock.now += 60
    limits.leave(permit, 50)
    with pytest.raises(Refusal, match="the prompt's 11 need 1 more"):
        limits.charge_prompt(limits.enter(acme), 11)


def test_a_prompt_over_a_minutes_worth_goes_in_when_the_bucket_is_full(limits, clock):
    acme = Tenant("acme", tokens_per_minute=60)
    limits.charge_prompt(limits.enter(acme), 90)
    with pytest.raises(Refusal) as info:
        limits.charge_prompt(limits.enter(acme), 90)
    assert info.value.retry_delay_ms == 90_000
    clock.now += 90
    limits.charge_prompt(limits.enter(acme), 90)


def test_a_request_that_is_refused_after_all_costs_nothing(limits):
    acme = Tenant("acme", max_requests=1, tokens_per_minute=60)
    permit = limits.enter(acme)
    limits.charge_prompt(permit, 60)
    limits.cancel(permit)
    limits.charge_prompt(limits.enter(acme), 60)


def test_limits_that_change_count_from_the_next_request_on(limits):
    limits.charge_prompt(limits.enter(Tenant("acme")), 10**9)
    limits.charge_prompt(limits.enter(Tenant("acme", tokens_per_minute=60)), 60)
    with pytest.raises(Refusal):
        limits.charge_prompt(limits.enter(Tenant("acme", tokens_per_minute=60)), 1)
    limits.charge_prompt(limits.enter(Tenant("acme")), 10**9)


def test_tenants_that_come_and_go_leave_nothing_behind(limits, clock):
    for number in range(5000):
        permit = limits.enter(Tenant(f"t{number}", tokens_per_minute=60))
        limits.charge_prompt(permit, 1)
        limits.leave(permit, 1)
        clock.now += 1
    assert len(limits._accounts) <= 1024


def test_many_tenants_of_whom_none_can_be_forgotten_are_seldom_looked_over(limits, monkeypatch):
    num_looks = 0

    def refill(account: _Account, now: float) -> None:
        nonlocal num_looks
        num_looks += 1

    monkeypatch.setattr(_Account, "refill", refill)
    for number in range(3000):
        limits.enter(Tenant(f"t{number}"))
    assert num_looks <= 1024 + 2048, "all when they are twice as many"


def test_many_tenants_that_were_here_at_once_leave_nothing_behind(limits):
    for permit in [limits.enter(Tenant(f"t{number}")) for number in range(3000)]:
        limits.leave(permit, 1)
    for number in range(3000, 9000):
        limits.leave(limits.enter(Tenant(f"t{number}")), 1)
    assert len(limits._accounts) <= 1024


def test_who_still_uses_something_is_not_forgotten_however_many_others_come(limits):
    busy, owing = Tenant("busy", max_requests=1), Tenant("owing", tokens_per_minute=60)
    limits.enter(busy)
    limits.leave(limits.enter(owing), 100)
    for number in range(3000):
        limits.leave(limits.enter(Tenant(f"t{number}")), 1)
    assert len(limits._accounts) <= 1024
    with pytest.raises(Refusal, match="'busy' has 1 live"):
        limits.enter(busy)
    with pytest.raises(Refusal, match="the prompt's 1 need 41 more"):
        limits.charge_prompt(limits.enter(owing), 1)
