"""vLLM in the place of batchway's own engine: the same calls, the same reports.

vLLM computes, counts blocks and schedules what has a place; `PlacingEngine` decides who has one."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from vllm import LLMEngine
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.metrics.loggers import StatLoggerBase

from contract.errors import ErrorCode
from workers.engine.grammar import Grammars
from workers.engine.interface import Sample
from workers.engine.sequence import RequestRefused, Sequence
from workers.engine.step_plan import StepReport
from workers.lanes import DEFAULT_LANES, Lane
from workers.vllm_engine.images import with_images
from workers.vllm_engine.placing import HostOutput, PlacingEngine


class Stats(StatLoggerBase):  # type: ignore[misc]  # vLLM is not installed here
    """vLLM's report about its last step. Fields that a version does not have count as 0."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.num_running = self.num_waiting = 0
        self.kv_usage = 0.0
        self.num_prompt_tokens = self.num_output_tokens = self.num_preempted = 0
        self.num_prefix_queries = self.num_prefix_hits = 0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self.num_running = scheduler_stats.num_running_reqs
            self.num_waiting = scheduler_stats.num_waiting_reqs
            self.kv_usage = scheduler_stats.kv_cache_usage
            prefix = scheduler_stats.prefix_cache_stats
            self.num_prefix_queries += prefix.queries
            self.num_prefix_hits += prefix.hits
        if iteration_stats is not None:
            self.num_prompt_tokens += iteration_stats.num_prompt_tokens
            self.num_output_tokens += iteration_stats.num_generation_tokens
            self.num_preempted += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        pass

    def take(self, report: StepReport, num_blocks: int) -> None:
        """Moves what was counted since the last report into this one."""
        report.num_running, report.num_waiting = self.num_running, self.num_waiting
        report.num_free_blocks = round(num_blocks * (1.0 - self.kv_usage))
        report.num_decode_tokens = report.num_step_seqs = self.num_output_tokens
        report.num_step_tokens = self.num_output_tokens + self.num_prompt_tokens
        report.num_preemptions = self.num_preempted
        report.num_prefix_queries = self.num_prefix_queries
        report.num_prefix_hits = self.num_prefix_hits
        self.num_prompt_tokens = self.num_output_tokens = self.num_preempted = 0
        self.num_prefix_queries = self.num_prefix_hits = 0


class HostedEngine(PlacingEngine):
    """Runs requests on vLLM. A lane's priority becomes vLLM's, a tenant its cache salt."""

    takes_images = True

    def __init__(
        self,
        llm: LLMEngine,
        stats: Stats,
        eos_token_ids: frozenset[int],
        arguments_of: Callable[[Sequence], dict[str, Any]],
        lanes: Seq[Lane] = DEFAULT_LANES,
        grammars: Grammars | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`arguments_of` a choice: those of vLLM's SamplingParams that say how it is sampled; may
        raise RequestRefused. Without `grammars`, constrained jobs are refused."""
        cache = llm.vllm_config.cache_config
        self.num_blocks: int = cache.num_gpu_blocks or 1
        self.block_size: int = cache.block_size
        host = VllmRequests(llm, stats, self.num_blocks, self.block_size, arguments_of)
        vocab_size = llm.model_config.get_vocab_size()
        super().__init__(host, vocab_size, eos_token_ids, lanes, grammars, clock_s)


class VllmRequests:
    """The requests that vLLM has: a `Host`."""

    def __init__(
        self,
        llm: LLMEngine,
        stats: Stats,
        num_blocks: int,
        block_size: int,
        arguments_of: Callable[[Sequence], dict[str, Any]],
    ) -> None:
        config = llm.vllm_config
        self.num_places: int = config.scheduler_config.max_num_seqs
        self.num_step_tokens: int = config.scheduler_config.max_num_batched_tokens
        self.max_model_len: int = config.model_config.max_model_len
        self.num_kv_tokens = num_blocks * block_size
        self._llm = llm
        self._stats = stats
        self._num_blocks = num_blocks
        self._arguments_of = arguments_of
        self._sequences: dict[str, Sequence] = {}  # by vLLM's request id
        self._ids: dict[Sequence, str] = {}

    def start(self, sequence: Sequence, priority: int) -> None:
        """As `Host.start`. Raises RequestRefused."""
        params = sequence.params
        # Output of an aborted request may still come, under its own id.
        parts = sequence.job_id, sequence.epoch, sequence.choice, sequence.num_preemptions
        request_id = "/".join(map(str, parts))
        prompt: Any = {
            "prompt_token_ids": list(sequence.token_ids),
            "cache_salt": sequence.tenant,
        }
        if sequence.images:
            prompt = with_images(self._llm, prompt, sequence)
        asked = SamplingParams(
            max_tokens=params.max_tokens - sequence.num_output,
            stop_token_ids=sorted(sequence.ending_ids),
            ignore_eos=True,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs if sequence.scores_prompt else None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            **self._arguments_of(sequence),
        )
        try:
            self._llm.add_request(request_id, prompt, asked, priority=priority)
        except (ValueError, VLLMClientError) as exc:  # an --engine-arg allows less
            parameter = getattr(exc, "parameter", None) or "the request"
            message = f"vLLM refuses {parameter}: its arguments allow less"
            raise RequestRefused(ErrorCode.BAD_PARAMETER, message) from exc
        self._sequences[request_id] = sequence
        self._ids[sequence] = request_id

    def abort(self, sequences: Seq[Sequence]) -> None:
        """As `Host.abort`."""
        request_ids = [self._ids[sequence] for sequence in sequences if sequence in self._ids]
        for request_id in request_ids:
            self._forget(request_id)
        if request_ids:
            self._llm.abort_request(request_ids)

    def step(self) -> list[HostOutput]:
        """As `Host.step`. Raises what vLLM raises if its engine has died."""
        return [
            self._output(output, self._sequences[output.request_id])
            for output in self._llm.step()
            if isinstance(output, RequestOutput) and output.request_id in self._sequences
        ]

    def count(self, report: StepReport) -> None:
        """As `Host.count`."""
        if not self._ids:  # vLLM reports nothing more
            self._stats.num_running = self._stats.num_waiting = 0
            self._stats.kv_usage = 0.0
        self._stats.take(report, self._num_blocks)

    def _output(self, output: RequestOutput, sequence: Sequence) -> HostOutput:
        [completion] = output.outputs
        prompt_samples: tuple[Sample, ...] = ()
        if output.prompt_logprobs:
            prompt_samples = _prompt_samples(sequence, output.prompt_logprobs)
        if completion.finish_reason is not None:
            self._forget(output.request_id)
        samples = _samples(completion, sequence.params.logprobs)
        num_cached = output.num_cached_tokens or 0
        return HostOutput(sequence, samples, prompt_samples, num_cached, completion.finish_reason)

    def _forget(self, request_id: str) -> None:
        del self._ids[self._sequences.pop(request_id)]


def _samples(completion: CompletionOutput, num_top: int | None) -> list[Sample]:
    if completion.logprobs is None or num_top is None:
        return [Sample(token_id) for token_id in completion.token_ids]
    scored = zip(completion.token_ids, completion.logprobs, strict=True)
    return [Sample(token_id, *_scores(found, token_id, num_top)) for token_id, found in scored]


def _scores(
    found: dict[int, Logprob], token_id: int, num_top: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Returns a token's log probability, and the most likely tokens with theirs."""
    ranked = sorted(found.items(), key=lambda item: (item[1].rank or 0, item[0]))
    top = [(i, value.logprob) for i, value in ranked if (value.rank or 0) <= num_top]
    return found[token_id].logprob, tuple(top[:num_top])


def _prompt_samples(
    sequence: Sequence, found: Seq[dict[int, Logprob] | None]
) -> tuple[Sample, ...]:
    """Returns a sample for each of the prompt's tokens from the second on."""
    num_top = sequence.params.prompt_logprobs or 0
    samples = []
    for position in range(1, sequence.num_prompt):
        scores = found[position] if position < len(found) else None
        if scores is None:
            return ()
        token_id = sequence.token_ids[position]
        samples.append(Sample(token_id, *_scores(scores, token_id, num_top)))
    return tuple(samples)
