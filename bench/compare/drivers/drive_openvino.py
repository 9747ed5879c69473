"""OpenVINO GenAI's continuous batching pipeline, stepped by hand.

Options: "kv_gib", size of the KV cache; "max_num_seqs", "max_num_batched_tokens"; "lookup", fields of its
GenerationConfig for drafts from the prompt and the answer so far, if any.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai
from lines import Request, play_in_steps, serve


class OpenVino:
    """The pipeline on the CPU, with its own defaults for precision."""

    version = openvino_genai.__version__
    started_at = None

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = options["kv_gib"]
        scheduler.max_num_seqs = options["max_num_seqs"]
        scheduler.max_num_batched_tokens = options["max_num_batched_tokens"]
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        self._lookup: dict[str, Any] = options.get("lookup", {})
        properties = {"prompt_lookup": True} if self._lookup else {}
        self.pids = [os.getpid()]
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._num_requests = 0

    def play(self, requests: list[Request]) -> None:
        """Steps until all have ended."""
        handles: dict[int, Any] = {}

        def submit(index: int, request: Request) -> None:
            generation = openvino_genai.GenerationConfig()
            generation.max_new_tokens = request.max_tokens
            generation.ignore_eos = True
            generation.do_sample = False
            for name, value in self._lookup.items():
                setattr(generation, name, value)
            prompt = openvino.Tensor(np.array([request.token_ids], dtype=np.int64))
            handles[index] = self._pipeline.add_request(self._num_requests, prompt, generation)
            self._num_requests += 1

        def step() -> Iterable[tuple[int, Sequence[int]]]:
            self._pipeline.step()
            for index, handle in handles.items():
                if handle.can_read():
                    for output in handle.read().values():
                        yield index, output.generated_ids

        # As a list: all tokens of a step have the time of its end.
        play_in_steps(requests, submit, lambda: list(step()), self._pipeline.has_non_finished_requests)

    def close(self) -> None:
        """Nothing outlives the process."""


if __name__ == "__main__":
    serve(OpenVino)
