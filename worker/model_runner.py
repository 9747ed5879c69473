"""One step: swap out, swap in, copy, forward, sample, all given to the device without waiting for its results.

A token that the previous step samples is taken from where that step leaves it on the device. The host waits for a step
only when its answer is asked for, or when a later step penalizes tokens that it samples.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse
from worker.cache_engine import CacheEngine
from worker.decode_graphs import MOST_ROWS, DecodeGraphs, Recorder
from worker.inputs import (
    LAST_SAMPLED,
    Integers,
    MalformedStep,
    ModelInputs,
    Step,
    StepLimits,
    entered_blocks,
    make_inputs,
    read_step,
)
from worker.last_tokens import LastTokens
from worker.layers.attention import AttentionMetadata
from worker.layers.embedding import Head
from worker.live_requests import LiveRequests
from worker.logprobs import TokenLogprobs, prompt_logprobs
from worker.models.model import Model
from worker.sampler import SampledTokens, draw_tokens
from worker.sampling_parameters import Sample
from worker.step_in_flight import Note, StepInFlight, StepMarks, to_host
from worker.streams import Mark, Streams, streams_of
from worker.transfer import Array

# Without a step for this long, the runner counts as idle.
_IDLE_S = 0.1
Column = TypeVar("Column", Array, Tensor)


class ModelRunner:
    """Executes steps, one after the other, on one thread.

    Args:
        model: with its weights.
        cache: its block pools.
        max_num_batched_tokens: most tokens in a step.
        context_length: most tokens in a sequence.
        device: where the model and the cache are.
        streams: of the device; None: as `streams_of` returns them.
    """

    def __init__(
        self,
        model: Model,
        cache: CacheEngine,
        *,
        max_num_batched_tokens: int,
        context_length: int,
        device: torch.device,
        streams: Streams | None = None,
    ) -> None:
        self._model = model
        self._ranks = model.ranks
        # The arrival of the previous stage's hidden states for the step that is being launched.
        self._arrived: Mark | None = None
        self._cache = cache
        self.device = device
        self._streams = streams or streams_of(device)
        self.limits = StepLimits(
            vocabulary_size=model.config.vocabulary_size,
            context_length=context_length,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=cache.shape.block_size,
            num_blocks=cache.num_blocks,
            num_cpu_blocks=cache.num_cpu_blocks,
        )
        self._last_tokens = LastTokens(device)
        self._live = LiveRequests(self.limits, self._last_tokens)
        self._graphs: DecodeGraphs | None = None
        # The one step in flight, if any, that samples tokens which the penalties of later steps need.
        self._to_be_noted: StepInFlight | None = None
        # When the last launch returned, by the monotonic clock; inf while a step is being launched.
        self._idle_since = -math.inf
        if not self._ranks.place.is_first:
            self._ranks.on_arrival = self._note_arrival

    @torch.inference_mode()
    def record_decodes(self, record: Recorder, most_rows: int = MOST_ROWS) -> None:
        """Records steps of decodes only, which are replayed from then on. Call it while no step is in flight.

        Args:
            record: the device's recorder; the model and its operations have to be recordable there.
            most_rows: most rows of a recorded step.
        """
        self._graphs = DecodeGraphs(
            self._forward,
            record,
            most_rows=min(most_rows, self.limits.max_num_batched_tokens),
            block_size=self.limits.block_size,
            context_length=self.limits.context_length,
            device=self.device,
        )

    def populate_cache(self) -> None:
        """Populates the cache's memory before it is needed, on any thread, while no steps come: it occupies a core."""
        self._cache.populate(self._wait_until_idle)

    def _wait_until_idle(self) -> None:
        while time.monotonic() - self._idle_since < _IDLE_S:
            time.sleep(_IDLE_S)

    def is_usable(self) -> bool:
        """Whether the device still works; a GPU that has faulted does not, for as long as this process runs."""
        try:
            self._streams.mark().wait()
        except RuntimeError:
            return False
        return True

    def execute(self, request: ExecuteModelRequest) -> ExecuteModelResponse:
        """Runs one step and waits for it; raises what `launch` does."""
        return self.launch(request).result()

    @torch.inference_mode()
    def launch(self, request: ExecuteModelRequest) -> StepInFlight:
        """Launches one step on the device, after those launched before.

        Raises:
            MalformedStep: nothing is computed; new and finished requests may have been noted.
        """
        begun, self._arrived = self._streams.mark(), None
        step = read_step(request, self.limits)
        self._live.note(request, step)
        # The other stages have no logits, and check only what concerns them.
        samples = self._live.samples(step, self._note_samples) if self._ranks.place.is_last else []
        targets = self._live.prompt_targets(step) if self._ranks.place.is_last else []
        indexes = self._indexes(step, targets)

        self._idle_since = math.inf
        num_rows, num_tokens = len(step.request_ids), len(step.token_ids)
        graph_size = self._graphs.size_for(num_rows, num_tokens) if self._graphs is not None else None

        inputs, sent = make_inputs(
            step, self.limits.block_size, self.device, *indexes, num_padding=(graph_size or num_rows) - num_rows
        )
        there: _Indexes[Tensor] = _Indexes(*sent)
        if len(indexes.unknown) > 0:
            inputs.token_ids.index_copy_(0, there.unknown, self._last_tokens.read(there.unknown_places))
        swap = self._cache.swap(step.blocks_to_swap_out, step.blocks_to_swap_in)
        self._prepare_blocks(step, there.entered)
        prepared = self._streams.mark()

        # Prompt log-probabilities need the hidden states of more tokens than those after which one is sampled.
        scored = there.scored if self._ranks.place.is_last and not targets else None
        hidden = self._compute(inputs, scored, is_recorded=graph_size is not None)[:num_tokens]
        forwarded = self._streams.mark()

        sampled = to_host(self._sample(hidden, samples, there), self.device) if samples else None
        prompt = to_host(self._prompt_logprobs(hidden, step, targets, there.told), self.device) if targets else None
        marks = StepMarks(
            begun, prepared, forwarded, self._streams.mark(), swap, self._arrived, self._ranks.place.num_stages
        )
        notes = [
            Note(index, sample.history, sample.sequence_index, sample.position)
            for index, sample in enumerate(samples)
            if sample.history is not None
        ]
        in_flight = StepInFlight(request.step_id, request.epoch, marks, sampled, prompt, notes)
        if notes:
            self._to_be_noted = in_flight
        self._idle_since = time.monotonic()
        return in_flight

    def _note_samples(self) -> None:
        """Waits until the tokens that penalties depend on are noted."""
        if self._to_be_noted is not None:
            self._to_be_noted.result()
            self._to_be_noted = None

    def _indexes(self, step: Step, targets: Sequence[tuple[Integers, int]]) -> "_Indexes[Array]":
        """What goes to the device besides the inputs; the last check that may find the step malformed."""
        unknown, unknown_places = self._live.places_to_read(step)
        if unknown and self._ranks.place.num_stages > 1:
            raise MalformedStep("token_ids", f"{LAST_SAMPLED} stands for a token that another stage samples")
        kept, kept_places = self._live.places_to_write(step)
        scored: Array = step.query_starts[step.sample_rows + 1] - 1
        score_of_sample: Array = scored[:0]
        if np.any(scored[1:] <= scored[:-1]):
            scored, score_of_sample = np.unique(scored, return_inverse=True)
        told = np.concatenate([step.token_ids[:0], *(token_ids for token_ids, _ in targets)])
        entered: Array = step.token_ids[:0]
        if self._model.operations.reads_behind_context:
            entered = entered_blocks(step, self.limits.block_size)
        columns = (unknown, unknown_places, kept, kept_places, scored, score_of_sample, told, entered)
        return _Indexes(*(np.asarray(column, dtype=np.int64) for column in columns))

    def _prepare_blocks(self, step: Step, entered: Tensor) -> None:
        """Waits for swaps of its blocks, makes copy-on-write copies, and zeroes blocks that a sequence enters."""
        self._cache.wait_for_swaps(step.block_tables, step.blocks_to_copy)
        if len(step.blocks_to_copy) > 0:
            self._cache.copy(step.blocks_to_copy)
        if len(entered) > 0:
            # Attention reads whole blocks and masks what is beyond the context, and a NaN that the block's previous
            # owner left there would get through the mask, since 0 * NaN is NaN.
            self._cache.clear(entered)

    def _compute(self, inputs: ModelInputs, scored: Tensor | None, *, is_recorded: bool) -> Tensor:
        """Hidden states, [num_scored, hidden_size]; of all tokens if `scored` is None or the step is recorded."""
        if is_recorded:
            assert self._graphs is not None
            return self._graphs(inputs)
        if len(inputs.token_ids) == 0:
            return torch.empty(0)
        attention = inputs.attention
        if scored is not None and len(scored) < len(inputs.token_ids):
            attention = replace(attention, scored=scored)
        return self._forward(inputs.token_ids, inputs.positions, attention)

    def _forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionMetadata) -> Tensor:
        return self._model(token_ids, positions, self._cache.layers, attention)

    def _note_arrival(self) -> None:
        self._arrived = self._streams.mark()

    def _sample(self, hidden: Tensor, samples: Sequence[Sample], there: "_Indexes[Tensor]") -> SampledTokens:
        """Draws a token for each sample, and keeps it for the next step."""
        # If all hidden states are scored, there is nothing to pick out.
        states = hidden if len(there.scored) == len(hidden) else hidden[there.scored]
        head = self._finder
        are_best = [head is not None and sample.takes_best for sample in samples]
        if all(are_best):
            sampled = self._find_best(states, there.score_of_sample)
        elif head is not None and head.has_screen and any(are_best):
            sampled = self._find_best_and_draw(states, there.score_of_sample, samples, are_best)
        else:
            sampled = self._draw(states, there.score_of_sample, samples)
        # The hardware of another rank may round differently, and all ranks have to append the same tokens.
        self._ranks.agree(sampled.token_ids)
        if len(there.kept) > 0:
            token_ids = sampled.token_ids
            # A failed sample leaves a token, too: the next step may already be on its way and ask for it.
            self._last_tokens.write(
                there.kept_places, token_ids if len(there.kept) == len(samples) else token_ids[there.kept]
            )
        return sampled

    @property
    def _finder(self) -> Head | None:
        """The head, if it can find best tokens without memory for all logits."""
        head = self._model.head
        return head if isinstance(head, Head) and head.can_find_best else None

    def _find_best(self, states: Tensor, score_of_sample: Tensor) -> SampledTokens:
        """Finds the tokens of samples that take the best one."""
        assert self._finder is not None
        normalizers, best, most = (_for_samples(each, score_of_sample) for each in self._finder.find_best(states))
        return SampledTokens(best, most - normalizers, None, None)

    def _draw(self, states: Tensor, score_of_sample: Tensor, samples: Sequence[Sample]) -> SampledTokens:
        """Draws the tokens of any samples."""
        operations, logits = self._model.operations, _for_samples(self._model.head(states), score_of_sample)
        return draw_tokens(logits, samples, operations.sample_tokens, operations.normalizers_and_best)

    def _find_best_and_draw(
        self, states: Tensor, score_of_sample: Tensor, samples: Sequence[Sample], are_best: Sequence[bool]
    ) -> SampledTokens:
        """Treats each kind of sample as if it were alone: with a screen, log-probabilities have other last digits."""
        score_of_sample = score_of_sample if len(score_of_sample) > 0 else torch.arange(len(samples))
        is_best = torch.tensor(are_best)
        found = self._find_best(*_states_of(states, score_of_sample[is_best]))
        others = [sample for sample, is_one in zip(samples, are_best, strict=True) if not is_one]
        drawn = self._draw(*_states_of(states, score_of_sample[~is_best]), others)
        token_ids, logprobs = torch.empty(len(samples), dtype=torch.int64), torch.empty(len(samples))
        token_ids[is_best], token_ids[~is_best] = found.token_ids, drawn.token_ids
        logprobs[is_best], logprobs[~is_best] = found.logprobs, drawn.logprobs
        return SampledTokens(token_ids, logprobs, drawn.candidates, drawn.top_logprobs)

    def _prompt_logprobs(
        self, hidden: Tensor, step: Step, targets: Sequence[tuple[Integers, int]], told: Tensor
    ) -> TokenLogprobs:
        firsts = step.prompt_logprob_starts - step.num_computed_tokens[step.prompt_logprob_rows]
        firsts += step.query_starts[step.prompt_logprob_rows]
        # A slice, or a copy if there are several: hidden states are small compared with logits.
        states = [hidden[first : first + len(ids)] for first, (ids, _) in zip(firsts.tolist(), targets, strict=True)]
        return prompt_logprobs(
            self._model.head,
            self.limits.vocabulary_size,
            states[0] if len(states) == 1 else torch.cat(states),
            told,
            [count for ids, count in targets for _ in range(len(ids))],
        )


def _for_samples(scores: Tensor, score_of_sample: Tensor) -> Tensor:
    """The entry of `scores` that belongs to each sample."""
    return scores if len(score_of_sample) == 0 else scores[score_of_sample]


def _states_of(states: Tensor, score_of_sample: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden states of some samples, each once, and for each sample the index of its own among them."""
    own, score_of_sample = score_of_sample.unique(return_inverse=True)
    return states[own], score_of_sample


class _Indexes(NamedTuple, Generic[Column]):
    """What a step needs on the device besides its inputs, int64.

    Attributes:
        unknown: indices of the step's tokens that are to be filled in.
        unknown_places: the place of each among the last tokens.
        kept: indices of the samples whose tokens are kept.
        kept_places: the place where each is kept among the last tokens.
        scored: indices of the step's tokens whose hidden states the head scores, ascending.
        score_of_sample: for each sample, which of those scores are its logits; empty: each has its own, in order.
        told: prompt tokens whose log-probabilities are asked for.
        entered: blocks to be zeroed.
    """

    unknown: Column
    unknown_places: Column
    kept: Column
    kept_places: Column
    scored: Column
    score_of_sample: Column
    told: Column
    entered: Column
