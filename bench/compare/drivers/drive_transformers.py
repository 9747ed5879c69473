"""transformers, static or with continuous batching.

Options: "batching", "static" or "continuous"; for the latter "kv_gib", size of the KV cache, and
"max_num_batched_tokens"; for the former "lookup", arguments of `generate()` for drafts from the prompt and the answer
so far, if any: it drafts for one sequence only, so requests then run one after the other.
"""

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers
from lines import Request, play_in_steps, serve

_PAGE_TOKENS = 256
_WAIT_S = 0.05


def _load(model: str, attention: str) -> Any:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, attn_implementation=attention
    )
    return loaded.eval()


class Static:
    """`generate()`: all prompts padded on the left to one batch, which runs to the end of its longest answer."""

    version = transformers.__version__
    started_at = None

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.pids = [os.getpid()]
        self._model = _load(model, "sdpa")
        self._lookup: dict[str, Any] = options.get("lookup", {})

    def play(self, requests: list[Request]) -> None:
        """Runs all as one batch, at once, or each by itself."""
        assert all(request.at == 0 for request in requests), "a static batch has no arrivals"
        started = time.perf_counter()
        for batch in [[request] for request in requests] if self._lookup else [requests]:
            self._generate(batch, started)

    def _generate(self, requests: list[Request], started: float) -> None:
        length = max(len(request.token_ids) for request in requests)
        pads = [length - len(request.token_ids) for request in requests]
        ids = torch.tensor([[0] * pad + r.token_ids for pad, r in zip(pads, requests, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (length - pad) for pad in pads])
        count = max(request.max_tokens for request in requests)
        times: list[float] = []

        def note(input_ids: torch.Tensor, scores: object, **others: object) -> torch.Tensor:
            num_new = input_ids.shape[1] - length - len(times)
            times.extend([time.perf_counter() - started] * num_new)
            return torch.zeros(len(requests), dtype=torch.bool)

        with torch.inference_mode():
            outputs = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[note],
                **self._lookup,
            )
        for request, output in zip(requests, outputs.tolist(), strict=True):
            request.times = times[: request.max_tokens]
            request.tokens = output[length : length + request.max_tokens]

    def close(self) -> None:
        """Nothing outlives the process."""


class Continuous:
    """Its manager of continuous batching: a thread that computes, and results that stream out of it."""

    version = transformers.__version__
    started_at = None

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.pids = [os.getpid()]
        loaded = _load(model, "sdpa")
        config = loaded.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token_bytes = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
        self._manager = loaded.init_continuous_batching(
            generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                page_size=_PAGE_TOKENS,
                num_blocks=(options["kv_gib"] << 30) // (token_bytes * _PAGE_TOKENS),
                max_batch_tokens=options["max_num_batched_tokens"],
                auto_switch_to_flash=False,
            ),
        )
        self._manager.start()
        self._num_runs = 0

    def play(self, requests: list[Request]) -> None:
        """Waits for results until all have ended."""
        self._num_runs += 1
        seen: dict[int, int] = {}

        def submit(index: int, request: Request) -> None:
            seen[index] = 0
            self._manager.add_request(
                request.token_ids,
                request_id=f"{self._num_runs}-{index}",
                max_new_tokens=request.max_tokens,
                streaming=True,
                eos_token_id=-1,
            )

        def step() -> Iterable[tuple[int, Sequence[int]]]:
            result = self._manager.get_result(timeout=_WAIT_S)
            if result is None:
                error = self._manager.background_thread_status.fatal_error
                if error is not None:
                    raise RuntimeError(error)
                return
            if result.error:
                raise RuntimeError(result.error)
            index = int(result.request_id.split("-")[1])
            ids = result.generated_tokens[seen[index] :]
            seen[index] += len(ids)
            if result.is_finished():
                del seen[index]
            yield index, ids

        play_in_steps(requests, submit, lambda: list(step()), lambda: bool(seen))

    def close(self) -> None:
        """Stops its thread."""
        self._manager.stop(block=True)


def _engine(model: str, options: dict[str, Any]) -> Static | Continuous:
    return Static(model, options) if options["batching"] == "static" else Continuous(model, options)


if __name__ == "__main__":
    serve(_engine)
