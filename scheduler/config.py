"""The scheduler's settings."""

from typing import Self

from pydantic import Field, model_validator

from protos.process import Settings
from scheduler.scheduler import Policy


class SchedulerSettings(Settings):
    """Pagewire scheduler: batches sequences step by step over a pool of KV blocks."""

    listen: str = Field("127.0.0.1:50052", description='address for routers: "host:port" or "unix:/path"')
    worker: str = Field("127.0.0.1:50053", description='the worker\'s address: "host:port" or "unix:/path"')
    max_num_batched_tokens: int = Field(512, ge=1, description="tokens of a step at most, prefill and decode together")
    max_num_seqs: int = Field(128, ge=1, description="sequences that run together at most")
    max_waiting_requests: int = Field(4096, ge=1, description="requests that wait at most; more are refused")
    watermark: float = Field(0.01, ge=0, lt=1, description="share of the blocks that admission leaves free for growth")
    prefix_caching: bool = Field(True, description="find blocks again by the tokens in them")
    lease_s: float = Field(5.0, gt=0, description="seconds that requests outlive a lost router")
    step_timeout_s: float = Field(120.0, gt=0, description="seconds after which a step's worker is given up")
    drain_grace_s: float = Field(30.0, ge=0, description="seconds that live requests get to finish after SIGTERM")
    max_failed_steps: int = Field(3, ge=1, description="steps lost with their worker after which a request is failed")

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.policy()
        return self

    def policy(self) -> Policy:
        """The part that the core knows."""
        return Policy(
            self.max_num_batched_tokens,
            self.max_num_seqs,
            self.max_waiting_requests,
            self.watermark,
            self.prefix_caching,
        )
