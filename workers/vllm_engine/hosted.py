"""vLLM's engine in the place of `workers.engine.engine.Engine`: the same calls, the same reports.

vLLM schedules, computes and counts blocks. Requests, endings and deadlines stay here: each choice
is a request of its own, and a `Sequence` contains what is known of it.

Over 300 lines: what vLLM runs and what waits for its grammar are stopped and reported alike.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from vllm import LLMEngine
from vllm.exceptions import VLLMClientError
from vllm.logprobs import Logprob
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from contract.errors import ErrorCode
from contract.jobs import FinishReason
from workers.engine.constraints import POLL_S, Constraints
from workers.engine.grammar import GrammarFailed, Grammars
from workers.engine.interface import Chunk, PromptLogprobs, Sample
from workers.engine.lanes import DEFAULT_LANES, Lane
from workers.engine.limits import Deadlines, EngineLimits
from workers.engine.report import JobError, StepReport, token_out
from workers.engine.request import RequestRefused, check_request, sequences_of
from workers.engine.sequence import Sequence
from workers.engine.strategy import Strategies
from workers.ipc.jobs import Request
from workers.vllm_engine.sampling import with_plugin, without_plugin
from workers.vllm_engine.stats import Stats


class HostedEngine:
    """Runs requests on vLLM. Lanes become vLLM's priorities, tenants its cache salts."""

    def __init__(
        self,
        llm: LLMEngine,
        stats: Stats,
        limits: EngineLimits,
        eos_token_ids: frozenset[int],
        lanes: Seq[Lane] = DEFAULT_LANES,
        has_plugin: bool = True,
        grammars: Grammars | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`has_plugin`: vLLM runs `SeededSampling`, else its own sampler alone. Without `grammars`,
        constrained jobs are refused."""
        self._arguments_of = with_plugin if has_plugin else without_plugin
        self._llm = llm
        self._stats = stats
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._clock_s = clock_s
        self._max_model_len: int = llm.vllm_config.model_config.max_model_len
        self._constraints = Constraints(grammars, self._max_model_len)
        cache = llm.vllm_config.cache_config
        self.num_blocks: int = cache.num_gpu_blocks or 1
        self.block_size: int = cache.block_size
        self._sequences: dict[str, Sequence] = {}  # by vLLM's request id
        self._compiling: dict[str, list[Sequence]] = {}  # by job, unknown to vLLM as yet
        self._epochs: dict[str, int] = {}  # of the jobs that run, or wait for their grammars
        self._choices: dict[str, dict[int, str]] = {}  # request ids by job and choice
        self._deadlines = Deadlines()
        self._ended_early: list[Sequence] = []
        self._has_new = False  # since the last announcement
        self._next_arrival = 0
        self._priorities: dict[str, int] = {}
        self.reconfigure(limits, None, lanes)

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def reconfigure(
        self, limits: EngineLimits, strategies: Strategies | None, lanes: Seq[Lane] = DEFAULT_LANES
    ) -> None:
        """Applies new lanes to new requests; vLLM's own limits stay as they are loaded."""
        self._limits = limits
        self._priorities = {lane.name: lane.priority for lane in lanes}

    def next_wake_s(self) -> float | None:
        if self._sequences or self._ended_early:
            return self._clock_s()
        poll_s = self._clock_s() + POLL_S if self._compiling else None
        return min((s for s in (self._deadlines.next_s, poll_s) if s is not None), default=None)

    def add(self, request: Request) -> None:
        """As `Engine.add`. Raises RequestRefused."""
        if self._epochs.get(request.job_id, -1) >= request.epoch:
            return
        self.stop_job(request.job_id, request.epoch - 1)
        check_request(
            request,
            vocab_size=self._limits.vocab_size,
            max_model_len=self._max_model_len,
            num_kv_tokens=self.num_blocks * self.block_size,
        )
        sequences = sequences_of(request, self._eos_token_ids, self._next_arrival)
        self._next_arrival += len(sequences)
        if request.params.grammar and sequences:
            self._constraints.compile(request.job_id, request.params.grammar, sequences)
            self._compiling[request.job_id] = list(sequences)
            self._epochs[request.job_id] = request.epoch
        else:
            self._enter(sequences)
        if request.deadline_s is not None and request.job_id in self._epochs:
            self._deadlines.add(request.deadline_s, request.job_id, request.epoch, self._epochs)

    def stop_job(self, job_id: str, epoch: int) -> None:
        """As `Engine.stop_job`."""
        self._ended_early = [s for s in self._ended_early if s.job_id != job_id or s.epoch > epoch]
        if self._epochs.get(job_id, epoch + 1) <= epoch:
            self._drop(job_id)

    def stop_choice(self, job_id: str, epoch: int, choice: int) -> None:
        """As `Engine.stop_choice`."""
        if self._epochs.get(job_id) != epoch:
            return
        if job_id in self._compiling:
            left = [s for s in self._compiling[job_id] if s.choice != choice]
            self._compiling[job_id] = left
            if not left:
                self._drop(job_id)
            return
        request_id = self._choices[job_id].get(choice)
        if request_id is not None:
            self._forget(request_id)
            self._llm.abort_request([request_id])

    def reprioritise(
        self, job_id: str, epoch: int, lane: str, deadline_s: float | None = None
    ) -> None:
        """Changes the deadline. vLLM cannot change a priority: what it runs keeps its lane."""
        if self._epochs.get(job_id) != epoch:
            return
        for sequence in self._sequences_of(job_id):
            sequence.lane = lane
            sequence.deadline_s = deadline_s
        if deadline_s is not None:
            self._deadlines.add(deadline_s, job_id, epoch, self._epochs)

    def step(self, announce: Callable[[Seq[Chunk]], None] | None = None) -> StepReport:
        """Runs one step of vLLM. Raises what vLLM raises if its engine has died."""
        report = StepReport(ended=self._ended_early)
        self._ended_early = []
        start_s = self._clock_s()
        self._expire(start_s, report)
        self._enter_compiled(report)
        if self._sequences:
            if self._has_new and announce is not None:
                announce([Chunk(s, 0, 1, samples=True) for s in self._sequences.values()])
            self._has_new = False
            for output in self._llm.step():
                if isinstance(output, RequestOutput):
                    self._take(output, report)
            report.step_s = self._clock_s() - start_s
        else:
            # No request is left; vLLM reports nothing more.
            self._stats.num_running = self._stats.num_waiting = 0
            self._stats.kv_usage = 0.0
        self._stats.take(report, self.num_blocks)
        return report

    def _enter_compiled(self, report: StepReport) -> None:
        for job_id, failure in self._constraints.compiled():
            sequences, epoch = self._compiling.pop(job_id), self._epochs.pop(job_id)
            code, message = ErrorCode.BAD_PARAMETER, str(failure)
            if failure is None:
                try:
                    self._enter(sequences)
                    continue
                except RequestRefused as refusal:
                    code, message = refusal.code, refusal.message
            report.failed.append(JobError(job_id, epoch, code, message))

    def _enter(self, sequences: Seq[Sequence]) -> None:
        """Hands sequences to vLLM; one that is complete ends at once. Raises RequestRefused."""
        for sequence in sequences:
            sequence.added_s = self._clock_s()
            sequence.finish_reason = sequence.end_reason(self._max_model_len)
            if sequence.finish_reason is not None:
                self._ended_early.append(sequence)
            else:
                self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        params = sequence.params
        request_id = f"{sequence.job_id}/{sequence.epoch}/{sequence.choice}"
        prompt = {
            "prompt_token_ids": list(sequence.token_ids),
            "cache_salt": sequence.tenant,
        }
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
        priority = self._priorities.get(sequence.lane, max(self._priorities.values(), default=0))
        try:
            self._llm.add_request(request_id, prompt, asked, priority=priority)
        except (ValueError, VLLMClientError) as exc:  # an --engine-arg allows less
            self._drop(sequence.job_id)
            parameter = getattr(exc, "parameter", None) or "the request"
            message = f"vLLM refuses {parameter}: its arguments allow less"
            raise RequestRefused(ErrorCode.BAD_PARAMETER, message) from exc
        self._sequences[request_id] = sequence
        self._epochs[sequence.job_id] = sequence.epoch
        self._choices.setdefault(sequence.job_id, {})[sequence.choice] = request_id
        self._has_new = True

    def _take(self, output: RequestOutput, report: StepReport) -> None:
        sequence = self._sequences.get(output.request_id)
        if sequence is None:
            return  # aborted while this step ran
        if output.prompt_logprobs:
            tokens = _prompt_samples(sequence, output.prompt_logprobs)
            if tokens:
                report.prompt_logprobs.append((sequence, PromptLogprobs(1, tokens)))
        [completion] = output.outputs
        for place, token_id in enumerate(completion.token_ids):
            position = sequence.num_output
            sequence.started_s = sequence.started_s or self._clock_s()
            if sequence.matcher is not None:
                try:
                    sequence.matcher.consume(token_id)
                except GrammarFailed as exc:
                    self._fail(sequence, str(exc), report, exc.code)
                    return
            sequence.token_ids.append(token_id)
            end = sequence.end_reason(self._max_model_len)
            logprob: float = 0.0
            top: tuple[tuple[int, float], ...] = ()
            if completion.logprobs is not None and sequence.params.logprobs is not None:
                found = completion.logprobs[place]
                logprob, top = _scores(found, token_id, sequence.params.logprobs)
            # A token that makes a constrained output whole is part of it; an ending token is not.
            is_whole = end is FinishReason.STOP and token_id not in sequence.ending_ids
            said = None if is_whole else end
            report.outputs.append(token_out(sequence, position, token_id, said, logprob, top))
            if end is not None:
                if is_whole:
                    report.ended.append(sequence)
                sequence.finish_reason = end
                self._forget(output.request_id)
                if completion.finish_reason is None:
                    self._llm.abort_request([output.request_id])
                report.num_finished += 1
                report.queue_s += sequence.started_s - sequence.added_s
                report.run_s += self._clock_s() - sequence.started_s
                return
        if completion.finish_reason is not None:  # vLLM ended it, and no token says why
            self._fail(sequence, f"vLLM ended the request: {completion.finish_reason}", report)

    def _fail(
        self,
        sequence: Sequence,
        message: str,
        report: StepReport,
        code: ErrorCode = ErrorCode.ENGINE_ERROR,
    ) -> None:
        report.failed.append(JobError(sequence.job_id, sequence.epoch, code, message))
        self._drop(sequence.job_id)

    def _expire(self, now_s: float, report: StepReport) -> None:
        for deadline_s, job_id, epoch in self._deadlines.take_passed(now_s):
            if self._epochs.get(job_id) != epoch:
                continue
            if all(s.deadline_s == deadline_s for s in self._sequences_of(job_id)):
                message = "the deadline passed before the job had ended"
                report.failed.append(JobError(job_id, epoch, ErrorCode.DEADLINE, message))
                self._drop(job_id)

    def _sequences_of(self, job_id: str) -> list[Sequence]:
        if job_id in self._compiling:
            return self._compiling[job_id]
        return [self._sequences[request_id] for request_id in self._choices[job_id].values()]

    def _drop(self, job_id: str) -> None:
        if self._compiling.pop(job_id, None) is not None:
            self._constraints.forget(job_id)
            del self._epochs[job_id]
        request_ids = list(self._choices.get(job_id, {}).values())
        for request_id in request_ids:
            self._forget(request_id)
        if request_ids:
            self._llm.abort_request(request_ids)

    def _forget(self, request_id: str) -> None:
        sequence = self._sequences.pop(request_id)
        choices = self._choices[sequence.job_id]
        del choices[sequence.choice]
        if not choices:
            del self._choices[sequence.job_id], self._epochs[sequence.job_id]


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
