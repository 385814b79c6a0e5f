"""The results and costs of one step, and the engine's state after it."""

import msgspec

from contract.events import TokenLogprob
from contract.jobs import FinishReason
from workers.engine import interface
from workers.engine.sequence import Sequence
from workers.ipc.messages import (
    ChoiceEnded,
    EngineLoad,
    FromEngine,
    JobFailed,
    Marked,
    PromptLogprobs,
    TokenOut,
    VectorOut,
)


def token_out(
    sequence: Sequence,
    position: int,
    token_id: int,
    finish_reason: FinishReason | None,
    logprob: float = 0.0,
    top_logprobs: tuple[tuple[int, float], ...] = (),
) -> TokenOut:
    """A new token of a sequence, with its log probabilities if its parameters ask for them."""
    scored = sequence.params.logprobs is not None
    return TokenOut(
        sequence.job_id,
        sequence.epoch,
        sequence.choice,
        position,
        token_id,
        finish_reason,
        TokenLogprob(token_id, logprob, top_logprobs) if scored else None,
    )


class StepReport(EngineLoad, array_like=False, tag=False):
    """What a step yields, and its counts; until it is sent, `step_s` is the model's time alone."""

    outputs: list[TokenOut] = msgspec.field(default_factory=list)
    # Complete without an ending token: on arrival, or because a grammar allows no more.
    ended: list[ChoiceEnded] = msgspec.field(default_factory=list)
    failed: list[JobFailed] = msgspec.field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = msgspec.field(default_factory=list)
    vectors: list[VectorOut] = msgspec.field(default_factory=list)
    marks: list[Marked] = msgspec.field(default_factory=list)

    def add_scores(self, sequence: Sequence, found: interface.PromptLogprobs) -> None:
        """Adds log probabilities of a part of the sequence's prompt."""
        scores = tuple(TokenLogprob(t.token_id, t.logprob, t.top_logprobs) for t in found.tokens)
        job_id, epoch, number = sequence.job_id, sequence.epoch, sequence.prompt_number
        self.prompt_logprobs.append(PromptLogprobs(job_id, epoch, found.start, scores, number))

    def messages(self, start_s: float, ended_s: float) -> list[FromEngine]:
        """Returns marks, prompt scores, tokens, vectors, ends, failures, and the load last. The
        times are those of the whole step."""
        load = EngineLoad(*[getattr(self, name) for name in EngineLoad.__struct_fields__])
        load.model_s, load.step_s, load.ended_s = self.step_s, ended_s - start_s, ended_s
        return [
            *self.marks,
            *self.prompt_logprobs,
            *self.outputs,
            *self.vectors,
            *self.ended,
            *self.failed,
            load,
        ]


def choice_ended(sequence: Sequence) -> ChoiceEnded:
    """The end of a sequence that no ending token tells of."""
    assert sequence.finish_reason is not None
    return ChoiceEnded(sequence.job_id, sequence.epoch, sequence.choice, sequence.finish_reason)
