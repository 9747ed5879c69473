"""The scheduler's settings."""

from dataclasses import fields
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from protos.tls import ClientTls
from protos.tls_settings import CaFile, ReadableFile, ServerTlsSettings, client_tls
from scheduler.policy import Policy, PreemptionMode

_NUM_SPECULATIVE_TOKENS = 24


class SchedulerSettings(ServerTlsSettings):
    """Pagewire scheduler: batches sequences step by step over a pool of KV blocks."""

    listen: str = Field("127.0.0.1:50052", description='address for routers: "host:port" or "unix:/path"')
    worker: str = Field(
        "127.0.0.1:50053", min_length=1, description='the worker\'s address: "host:port" or "unix:/path"'
    )
    worker_tls_ca: CaFile | None = Field(
        None, description="CA certificates that the worker's must come from; without it that wire is plaintext"
    )
    worker_tls_certificate: ReadableFile | None = Field(
        None, description="what the worker is shown where it asks (mTLS)"
    )
    worker_tls_key: ReadableFile | None = Field(None, description="that certificate's private key")
    max_num_batched_tokens: int = Field(512, ge=1, description="tokens of a step at most, prefill and decode together")
    max_num_seqs: int = Field(128, ge=1, description="sequences that run together at most")
    max_steps_in_flight: int | None = Field(
        None,
        ge=1,
        le=2,
        description="steps that the worker has at once at most; without it, 2 for a GPU, and 1 for a CPU, whose cores "
        "the planning would take from the step that runs. One that works at several at once has as many",
    )
    num_speculative_tokens: int | None = Field(
        None,
        ge=0,
        description="tokens that a step computes ahead for a sequence at most, guessed from what its last tokens were "
        "followed by before; no output changes; without it, 24 where one step is in flight at a time, else 0, for none",
    )
    max_waiting_requests: int = Field(4096, ge=1, description="requests that wait at most; more are refused")
    max_waiting_tokens: int = Field(1 << 20, ge=1, description="prompt tokens that wait at most, of all requests")
    max_waiting_requests_per_tenant: int | None = Field(
        None, ge=1, description="requests of one tenant that wait at most; without it, all that may wait"
    )
    watermark: float = Field(0.01, ge=0, lt=1, description="share of the blocks that admission leaves free for growth")
    prefix_caching: bool = Field(True, description="find blocks again by the tokens in them")
    chunked_prefill: bool = Field(True, description="let chunks of prompts join the decodes of a step")
    delay_factor: float = Field(
        0.0, ge=0, description="without chunked prefill: wait for prompts so many times the last prefill step's time"
    )
    preemption_mode: Literal["auto", "recompute", "swap"] = Field(
        "auto", description="how a request loses its blocks: auto takes what is estimated to cost less"
    )
    aging_s: float = Field(10.0, ge=0, description="seconds of waiting that one level of priority is worth")
    lease_s: float = Field(5.0, gt=0, description="seconds that requests outlive a lost router")
    health_stall_s: float = Field(
        5.0,
        gt=0,
        description="seconds without a step, where there is work, or without a sign of life from an idle worker, after "
        "which health is NOT_SERVING until there is one; a step may take four times what it is expected to, if that is "
        "longer. Requests are taken all the same, and wait",
    )
    step_timeout_s: float = Field(120.0, gt=0, description="seconds after which a step's worker is given up")
    drain_grace_s: float = Field(30.0, ge=0, description="seconds that live requests get to finish after SIGTERM")
    max_failed_steps: int = Field(
        3,
        ge=1,
        description="workers lost in a row in steps of a request, at last of it alone, after which it is failed",
    )
    record: Path | None = Field(
        None,
        description="file for all that the scheduler decides, and on what grounds, for `pagewire replay`; prompts and "
        "outputs are in it, as token ids",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.policy()
        _ = self.worker_tls
        return self

    @property
    def worker_tls(self) -> ClientTls | None:
        """TLS for the wire to the worker; None for plaintext."""
        return client_tls("worker-tls", self.worker_tls_ca, self.worker_tls_certificate, self.worker_tls_key)

    def policy(self, device: str = "cpu") -> Policy:
        """The part of the settings that the core knows, for a worker that computes on `device`."""
        chosen = {field.name: getattr(self, field.name) for field in fields(Policy)}
        chosen["preemption_mode"] = PreemptionMode(self.preemption_mode)
        keeps_two = device == "cuda" and not self.num_speculative_tokens
        chosen["max_steps_in_flight"] = num_steps = self.max_steps_in_flight or (2 if keeps_two else 1)
        if self.num_speculative_tokens is None:
            chosen["num_speculative_tokens"] = _NUM_SPECULATIVE_TOKENS if num_steps == 1 else 0
        return Policy(**chosen)
