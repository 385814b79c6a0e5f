"""Constrained jobs in the engine: they wait for their grammars. Tokens that a grammar forces need
no forward of their own."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future

from contract.errors import ErrorCode
from contract.jobs import FinishReason
from workers.engine.grammar import GrammarFailed, Grammars, Mask, Matcher
from workers.engine.interface import Chunk, Sample
from workers.engine.masks import StepMasks
from workers.engine.sequence import RequestRefused, Sequence
from workers.engine.step_plan import StepReport, choice_ended, token_out

# How often a finished grammar or mask is looked for while the engine has nothing else to do.
POLL_S = 0.002
# How long the rows of a step that have been computed wait for the masks of others.
_PATIENCE_S = 0.01


class Constraints:
    """Compiles the grammars of jobs beside the engine's steps; masks and forces their tokens."""

    def __init__(
        self, grammars: Grammars | None, max_model_len: int, *, skips_late: bool = False
    ) -> None:
        """Without `grammars`, constrained jobs are refused. `skips_late`: a row whose mask is late
        skips the step."""
        self._grammars = grammars
        self._max_model_len = max_model_len
        self._patience_s = _PATIENCE_S if skips_late else None
        self._compiling: dict[str, tuple[list[Sequence], Future[list[Matcher]]]] = {}

    @property
    def is_compiling(self) -> bool:
        return bool(self._compiling)

    def holds(self, job_id: str) -> bool:
        """Whether a job waits for its grammar."""
        return job_id in self._compiling

    def compile(self, job_id: str, grammar: str, sequences: list[Sequence]) -> None:
        """Starts to compile the grammar of a job. Raises RequestRefused."""
        if self._grammars is None:
            message = "this model cannot constrain its output to a grammar"
            raise RequestRefused(ErrorCode.BAD_PARAMETER, message)
        outputs = [s.token_ids[s.num_prompt :] for s in sequences]
        found = self._grammars.start_matchers(grammar, outputs, sequences[0].tenant)
        self._compiling[job_id] = sequences, found

    def forget(self, job_id: str) -> None:
        """Cancels a job's compilation, or drops its result."""
        _, found = self._compiling.pop(job_id, (None, None))
        if found is not None:
            found.cancel()

    def compiled(self) -> Iterator[tuple[str, GrammarFailed | None]]:
        """Jobs whose grammars are compiled, or failed to; each is returned once."""
        for job_id in [job_id for job_id, (_, found) in self._compiling.items() if found.done()]:
            sequences, found = self._compiling.pop(job_id)
            try:
                for sequence, matcher in zip(sequences, found.result(), strict=True):
                    sequence.matcher = matcher
            except GrammarFailed as failure:
                yield job_id, failure
            else:
                yield job_id, None

    def start_masks(self, chunks: Seq[Chunk]) -> StepMasks | None:
        """Starts to compute the masks of a step; returns None if no row is constrained."""
        if self._grammars is None:
            return None
        constrained = [
            (c, c.sequence.matcher) for c in chunks if c.samples and c.sequence.matcher is not None
        ]
        if not constrained:
            return None
        self._grammars.start_masks({m: c.token_ids[c.num_known :] for c, m in constrained})
        masks = {
            sequence: Mask(matcher.mask.found, matcher.mask.row + number)
            for chunk, matcher in constrained
            if matcher.mask is not None
            for number, sequence in enumerate(chunk.sampled)
        }
        return StepMasks(masks, self._patience_s)

    def take(self, sequence: Sequence, sample: Sample, report: StepReport) -> None:
        """Appends a sampled token and those that its grammar, if any, forces after it. Raises
        GrammarFailed."""
        self.append(sequence, sample, report)
        self.force(sequence, report)

    def force(self, sequence: Sequence, report: StepReport) -> None:
        """Appends the tokens that the grammar forces next: the next step computes their KV in one
        chunk. Appends none if log probabilities are asked for, which need a forward."""
        matcher = sequence.matcher
        if matcher is None or sequence.params.logprobs is not None:
            return
        for token_id in matcher.forced():
            if sequence.finish_reason is not None:
                return
            self.append(sequence, Sample(token_id), report)
            report.num_forced_tokens += 1

    def append(self, sequence: Sequence, sample: Sample, report: StepReport) -> None:
        """Appends a sampled token. Raises GrammarFailed."""
        if sequence.matcher is not None:
            sequence.matcher.consume(sample.token_id)
        position = sequence.num_output
        sequence.token_ids.append(sample.token_id)
        end = sequence.finish_reason = sequence.end_reason(self._max_model_len)
        if end is FinishReason.STOP and sample.token_id not in sequence.ending_ids:
            # The token is part of the output, unlike an ending token.
            report.ended.append(choice_ended(sequence))
            end = None
        report.outputs.append(
            token_out(sequence, position, sample.token_id, end, sample.logprob, sample.top_logprobs)
        )
