"""What one tenant may use of this router: requests at once, and tokens a minute.

Tokens flow into a bucket that holds a minute's worth. A prompt is taken out when its request is admitted, which it is
when there are as many (a prompt over a minute's worth: when the bucket is full), and the output when the request has
ended: the bucket may owe then, and new requests wait until it does not. Tokens found in the prefix cache count like
others. Each router process counts for itself.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from protos.errors import Refusal
from router.tenants import Tenant

# Before a request of the tenant has ended, nobody knows how long one takes.
_FIRST_DURATION_S = 1.0
_LONGEST_DELAY_S = 60.0
# Weight of the newest request in the mean of durations.
_NEWEST = 0.2
# With as many accounts, or twice as many as the last look left, those that tell nothing any more are looked for before
# another is opened: so what a look takes does not add up when none does.
_MANY_ACCOUNTS = 1024


@dataclass(slots=True, eq=False)
class _Account:
    """What a tenant uses now.

    Attributes:
        tenant: as it was last seen; its limits may change while we run.
        level: tokens in its bucket at the time `at`; under zero when it owes.
        mean_s: how long its requests take.
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
        """Whether a new account would say the same, but for the mean."""
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
        """Lets one more request of a tenant in, or one `instead` of another that is about to leave.

        Raises:
            Refusal: RESOURCE_EXHAUSTED: it has as many as it may.
        """
        now = self._clock()
        account = self._account(tenant, now)
        if tenant.max_requests is not None and account.num_live >= tenant.max_requests + instead:
            message = (
                f"{_named(tenant)} has {account.num_live} live requests at this router, of at most "
                f"{tenant.max_requests}; retry when one has ended"
            )
            # One of n ends in an n-th of the time that one takes.
            delay_s = min(account.mean_s / account.num_live, _LONGEST_DELAY_S)
            raise _exhausted("TENANT_REQUESTS_EXHAUSTED", message, delay_s)
        account.num_live += 1
        return Permit(account, now)

    def charge_prompt(self, permit: Permit, num_tokens: int) -> None:
        """Takes a prompt's tokens out of the tenant's bucket.

        Raises:
            Refusal: RESOURCE_EXHAUSTED: there are not as many; then none is taken.
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
        """A request has ended, and has cost so many tokens of output."""
        account, now = permit.account, self._clock()
        account.num_live -= 1
        account.refill(now)
        account.level -= num_output_tokens
        account.mean_s += _NEWEST * (now - permit.since - account.mean_s)

    def cancel(self, permit: Permit) -> None:
        """A request was refused after all, and has cost nothing."""
        permit.account.num_live -= 1
        permit.account.level += permit.num_prompt_tokens

    def _account(self, tenant: Tenant, now: float) -> _Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            if len(self._accounts) >= self._look_at:
                self._forget_idle(now)
            account = self._accounts[tenant.name] = _Account(tenant, tenant.tokens_per_minute or math.inf, now)
        account.tenant = tenant
        account.refill(now)
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
