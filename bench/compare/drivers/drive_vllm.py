"""vLLM on the CPU through its own engine loop, which is what `LLM.generate` runs.

Options: "kv_gib", size of the KV cache; "max_num_seqs", "max_num_batched_tokens", "max_model_len"; "lookup", keys of
its speculative_config for drafts from the prompt and the answer so far, if any.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lines import Request, play_in_steps, serve


class Vllm:
    """The engine in a process of its own, as vLLM starts it, and its loop in this one."""

    started_at = None

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        cores = sorted(os.sched_getaffinity(0))
        # Without this it leaves a core to its front end, and is slower.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(options["kv_gib"])
        os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        # For the processes that it starts; without it w1 takes a fifth longer.
        intel_openmp = Path(sys.prefix, "lib", "libiomp5.so")
        if intel_openmp.exists():
            os.environ["LD_PRELOAD"] = str(intel_openmp)
        lookup = options.get("lookup")
        import vllm

        self.version = vllm.__version__
        self.pids = [os.getpid()]
        self._sampling = vllm.SamplingParams
        self._engine = vllm.LLM(
            model,
            dtype="bfloat16",
            max_model_len=options["max_model_len"],
            max_num_seqs=options["max_num_seqs"],
            max_num_batched_tokens=options["max_num_batched_tokens"],
            enable_prefix_caching=True,
            disable_log_stats=True,
            speculative_config=lookup and {"method": "ngram"} | lookup,
        ).llm_engine
        self._num_runs = 0

    def play(self, requests: list[Request]) -> None:
        """Steps until all have ended."""
        self._num_runs += 1
        seen: Counter[int] = Counter()

        def submit(index: int, request: Request) -> None:
            sampling = self._sampling(temperature=0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False)
            name = f"{self._num_runs}-{index}"
            self._engine.add_request(name, {"prompt_token_ids": request.token_ids}, sampling)

        def step() -> Iterable[tuple[int, Sequence[int]]]:
            for output in self._engine.step():
                # vLLM may add letters of its own after the name.
                index = int(output.request_id.split("-")[1])
                ids = output.outputs[0].token_ids
                yield index, list(ids[seen[index] :])
                seen[index] = len(ids)

        play_in_steps(requests, submit, lambda: list(step()), self._engine.has_unfinished_requests)

    def close(self) -> None:
        """Ends its process."""
        self._engine.engine_core.shutdown()


if __name__ == "__main__":
    serve(Vllm)
