"""A scheduler core and what executes its steps, face to face: no wire, no clock, no process between them."""

from array import array
from collections import deque
from collections.abc import Callable
from typing import Protocol

from protos.sampling_pb2 import Sampling
from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse
from scheduler.beam import BeamParams
from scheduler.block_manager import BlockManager
from scheduler.plan import Plan, to_request, to_result
from scheduler.policy import Policy
from scheduler.scheduler import Scheduler
from scheduler.sequence import SequenceGroup

NUM_TOKENS = 16
EOS = 2


class Answer(Protocol):
    """The answer to a step that was launched."""

    def result(self) -> ExecuteModelResponse: ...


class Deployment:
    """Passes the plan of each step straight to `launch`, and its answer to the core, with as many steps in flight as
    are allowed.
    """

    def __init__(
        self,
        launch: Callable[[ExecuteModelRequest], Answer],
        num_blocks: int,
        num_swap_blocks: int = 0,
        *,
        budget: int = 512,
        num_concurrent_steps: int = 1,
        **policy,
    ) -> None:
        options = {"max_num_seqs": min(128, budget), "max_waiting_requests": 100, "watermark": 0.0} | policy
        self._launch = launch
        self.core = Scheduler(Policy(budget, **options), BlockManager(num_blocks, 16, num_swap_blocks))
        self.core.set_num_concurrent_steps(num_concurrent_steps)
        self.max_num_held = 0
        self.num_accepted = 0
        self._steps: deque[tuple[Plan, Answer]] = deque()

    def submit(self, place: int, prompt: list[int], n=1, beam: BeamParams | None = None, **sampling) -> SequenceGroup:
        return self.core.submit(
            request_id=str(place),
            prompt_token_ids=array("i", prompt),
            n=n,
            max_tokens=NUM_TOKENS,
            stop_token_ids=[EOS],
            beam=beam,
            sampling=Sampling(
                top_p=sampling.pop("top_p", 1.0), stop_token_ids=[EOS], num_prompt_tokens=len(prompt), **sampling
            ),
            now=float(place),
        )

    def step(self) -> None:
        """Plans a step; takes the oldest step's answer if no more may be in flight, or if there was nothing to plan."""
        plan = self.core.schedule(1000.0)
        self.core.check()
        if plan.rows:
            self._steps.append((plan, self._launch(to_request(plan, epoch=0))))
        if not plan.rows or len(self._steps) == self.core.in_flight.max_steps:
            oldest, answer = self._steps.popleft()
            response = answer.result()
            assert not response.failed_samples
            self.num_accepted += self.core.update(oldest, to_result(response)).num_accepted
            self.core.check()
        self.max_num_held = max(self.max_num_held, self.core.blocks.num_held)
