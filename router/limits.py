"""What one tenant may use of this router: requests at once, and tokens a minute.

Tokens flow into a bucket that holds a minute's worth. A request is admitted if the bucket has its prompt's tokens (for
a prompt over a minute's worth: if it is full), which are then taken out. The output is taken out when the request has
ended: the bucket may then fall below zero, and new requests are refused until it has refilled. Tokens found in the
prefix cache count like others. Each router process counts for itself.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from protos.errors import Refusal
from router.tenants import Tenant

# How long a tenant's requests are assumed to take before one of them has ended.
_FIRST_DURATION_S = 1.0
_LONGEST_DELAY_S = 60.0
# Weight of the newest request in the mean duration.
_NEWEST = 0.2
# Idle accounts are swept when there are this many, or twice as many as the last sweep left, so that sweeping costs
# little per account.
_MANY_ACCOUNTS = 1024


@dataclass(slots=True, eq=False)
class _Account:
    """What a tenant uses now.

    Attributes:
        tenant: as it was last seen; its limits may change while we run.
        level: tokens in its bucket at the time `at`; below zero when the tenant owes.
        mean_s: how long its requests take on average.
    """

    tenant: Tenant
    level: float
    at: float
    num_live: int = 0
    mean_s: float = _FIRST_DURATION_S

    def refill(self, now: float) -> None:
        per_minute = self.tenant.tokens_per_minute
        if per_minute is None:
            self.level = math.inf
        else:
            self.level = min(per_minute, self.level + (now - self.at) * per_minute / 60)
        self.at = now

    @property
    def idle(self) -> bool:
        """Whether a new account would be the same, except for the mean."""
        return self.num_live == 0 and self.level >= (self.tenant.tokens_per_minute or math.inf)


@dataclass(slots=True, eq=False)
class Permit:
    """One request of a tenant, from `TenantLimits.enter` to `leave` or `cancel`."""

    account: _Account
    since: float
    num_prompt_tokens: int = 0


class TenantLimits:
    """The accounts of all tenants."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._look_at = _MANY_ACCOUNTS

    def enter(self, tenant: Tenant, *, instead: bool = False) -> Permit:
        """Admits one more request of a tenant, or one `instead` of another that is about to leave.

        Raises:
            Refusal: RESOURCE_EXHAUSTED: the tenant has as many as it may.
        """
        now = self._clock()
        account = self._account(tenant, now)
        if tenant.max_requests is not None and account.num_live >= tenant.max_requests + instead:
            message = (
                f"{_named(tenant)} has {account.num_live} live requests at this router, of at most "
                f"{tenant.max_requests}; retry when one has ended"
            )
            # Of n live requests, one ends in about an n-th of the time that one takes.
            delay_s = min(account.mean_s / account.num_live, _LONGEST_DELAY_S)
            raise _exhausted("TENANT_REQUESTS_EXHAUSTED", message, delay_s)
        account.num_live += 1
        return Permit(account, now)

    def charge_prompt(self, permit: Permit, num_tokens: int) -> None:
        """Takes a prompt's tokens out of the tenant's bucket.

        Raises:
            Refusal: RESOURCE_EXHAUSTED: it holds too few; then none are taken.
        """
        account = permit.account
        per_minute = account.tenant.tokens_per_minute
        if per_minute is None:
            return
        account.refill(self._clock())
        missing = min(num_tokens, per_minute) - account.level
        if missing > 0:
            message = (
                f"{_named(account.tenant)} has used up its {per_minute} tokens a minute at this router; the prompt's "
                f"{num_tokens} need {math.ceil(missing)} more: retry after the delay, or send less"
            )
            raise _exhausted("TENANT_TOKENS_EXHAUSTED", message, missing * 60 / per_minute)
        account.level -= num_tokens
        permit.num_prompt_tokens = num_tokens

    def leave(self, permit: Permit, num_output_tokens: int) -> None:
        """Ends a request, whose output has cost `num_output_tokens`."""
        account, now = permit.account, self._clock()
        account.num_live -= 1
        account.refill(now)
        account.level -= num_output_tokens
        account.mean_s += _NEWEST * (now - permit.since - account.mean_s)

    def cancel(self, permit: Permit) -> None:
        """Undoes the admission of a request that was refused after all, so that it costs nothing."""
        permit.account.num_live -= 1
        permit.account.level += permit.num_prompt_tokens

    def _account(self, tenant: Tenant, now: float) -> _Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            if len(self._accounts) >= self._look_at:
                self._forget_idle(now)
            account = self._accounts[tenant.name] = _Account(tenant, tenant.tokens_per_minute or math.inf, now)
        account.tenant = tenant
        return account

    def _forget_idle(self, now: float) -> None:
        for account in self._accounts.values():
            account.refill(now)
        self._accounts = {name: account for name, account in self._accounts.items() if not account.idle}
        self._look_at = max(_MANY_ACCOUNTS, 2 * len(self._accounts))


def _named(tenant: Tenant) -> str:
    return f"tenant {tenant.name!r}" if tenant.name else "this client"


def _exhausted(reason: str, message: str, delay_s: float) -> Refusal:
    delay_ms = max(1, math.ceil(delay_s * 1e3))
    return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, message, retry_delay_ms=delay_ms)
