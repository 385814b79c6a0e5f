"""Converts a step's report into messages for the supervisor."""

from contract.events import TokenLogprob
from workers.engine import interface
from workers.engine.report import StepReport
from workers.engine.sequence import Sequence
from workers.ipc.messages import (
    ChoiceEnded,
    EngineLoad,
    FromEngine,
    JobFailed,
    PromptLogprobs,
    VectorOut,
)


def step_messages(report: StepReport, start_s: float, ended_s: float) -> list[FromEngine]:
    """Returns prompt scores, tokens, vectors, ends, failures, and the load last."""
    return [
        *(_prompt_logprobs(sequence, found) for sequence, found in report.prompt_logprobs),
        *report.outputs,
        *(VectorOut(s.job_id, s.epoch, s.choice, vector) for s, vector in report.vectors),
        *(
            ChoiceEnded(ended.job_id, ended.epoch, ended.choice, ended.finish_reason)
            for ended in report.ended
            if ended.finish_reason is not None
        ),
        *(JobFailed(e.job_id, e.epoch, e.code, e.message) for e in report.failed),
        EngineLoad(
            report.num_running,
            report.num_waiting,
            report.num_free_blocks,
            report.num_step_tokens,
            ended_s - start_s,
            report.num_padding_tokens,
            report.num_step_seqs,
            report.num_decode_tokens,
            report.num_preemptions,
            report.num_recomputed_tokens,
            report.num_prefix_queries,
            report.num_prefix_hits,
            report.num_finished,
            report.queue_s,
            report.run_s,
            ended_s,
            report.waiting_lanes,
            report.num_forced_tokens,
            report.num_drafted_tokens,
            report.num_accepted_tokens,
        ),
    ]


def _prompt_logprobs(sequence: Sequence, found: interface.PromptLogprobs) -> PromptLogprobs:
    logprobs = tuple(TokenLogprob(t.token_id, t.logprob, t.top_logprobs) for t in found.tokens)
    number = sequence.prompt_number
    return PromptLogprobs(sequence.job_id, sequence.epoch, found.start, logprobs, number)
