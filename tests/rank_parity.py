"""Twenty greedy requests on the ranks of one executor, face to face with the scheduler core, in a process of its own.

    python tests/rank_parity.py EXECUTOR TENSOR_SIZE NUM_STAGES NUM_BLOCKS MODEL FILE

The second half of the prompts shares a prefix. The results are written to FILE as JSON. torchrun may start it too.
"""

import json
import os
import sys
from pathlib import Path

PROMPTS = (Path(__file__).parent / "prompts.txt").read_text().rstrip("\n").split("\n\n")
NUM_REQUESTS = 20


def main(kind: str, tensor_size: int, num_stages: int, num_blocks: int, model: str, file: Path) -> None:
    from direct import Deployment
    from transformers import AutoTokenizer

    from worker.config import WorkerSettings
    from worker.executor.choose import is_follower, make_executor
    from worker.executor.external import follow

    sizes = {"tensor_parallel_size": tensor_size, "pipeline_parallel_size": num_stages, "num_threads": 1}
    settings = WorkerSettings(model=model, dtype="float32", num_gpu_blocks=num_blocks, executor=kind, **sizes)
    if is_follower(settings, os.environ):
        follow(settings)
    executor = make_executor(settings)
    info = executor.load(lambda: os._exit(1))
    drafts = 0 if kind == "uni" else 8
    num_steps = max(1, info.num_concurrent_steps)
    deployment = Deployment(executor.launch, num_blocks, num_concurrent_steps=num_steps, num_speculative_tokens=drafts)
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [PROMPTS[place % len(PROMPTS)] for place in range(NUM_REQUESTS)]
    shared = "\n".join(PROMPTS[:5])
    prompts = [text if place < NUM_REQUESTS // 2 else f"{shared}\n{text}" for place, text in enumerate(texts)]
    groups = [deployment.submit(place, tokenizer(prompt).input_ids) for place, prompt in enumerate(prompts)]
    while deployment.core.num_live:
        deployment.step()
    outcome = {
        "tokens": [group.sequences[0].output_token_ids.tolist() for group in groups],
        "num_preemptions": deployment.core.num_preemptions,
        "num_found_tokens": deployment.core.num_found_tokens,
        "max_num_held": deployment.max_num_held,
        "num_accepted": deployment.num_accepted,
    }
    file.write_text(json.dumps(outcome))
    os._exit(0)  # ranks end with this process


if __name__ == "__main__":
    kind, *sizes, model, file = sys.argv[1:]
    main(kind, *map(int, sizes), model, Path(file))
