"""Compares a real model's resumed answer with its undisturbed one.

Rows of a matrix product differ in the last bits with the shape of their batch, so a near-tie may be
decided the other way. Teacher-forced scoring shows whether a differing token was a near-tie.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from contract.events import TokenLogprob
from contract.jobs import Job
from tests.resume.logged_job import LoggedJob
from workers.engine.interface import Chunk
from workers.engine.sequence import Sequence, ending_token_ids
from workers.model.runner import ModelRunner
from workers.model.sampler import add_gumbel_noise, adjust_logits, row_key

# In the sampler's scores: logits divided by temperature, plus noise.
NEAR_TIE = 1e-3
LOGPROB_TOLERANCE = 1e-4


@dataclass
class Judge:
    """`num_near_ties` counts the accepted differences, each of less than `near_tie`."""

    runner: ModelRunner
    num_near_ties: int = 0
    near_tie: float = NEAR_TIE

    def compare(self, found: LoggedJob, whole: LoggedJob) -> None:
        """Tokens, text, finish reasons, log probabilities and usage are equal for each choice. If a
        near-tie was decided the other way, they are equal up to it."""
        assert found.has_ended
        answer, expected = found.answer, whole.answer
        assert same_logprobs(answer.prompts.get(0, []), expected.prompts.get(0, []))
        num_ties_before = self.num_near_ties
        for choice, token_ids in expected.token_ids.items():
            if answer.token_ids[choice] != token_ids:
                self._check_near_tie(whole.job, choice, token_ids, answer.token_ids[choice])
                continue
            assert answer.text[choice] == expected.text[choice]
            assert answer.finish_reason[choice] == expected.finish_reason[choice]
            assert same_logprobs(answer.logprobs[choice], expected.logprobs[choice])
        assert found.num_tokens == sum(map(len, answer.token_ids.values()))
        assert found.num_tokens == whole.num_tokens or self.num_near_ties > num_ties_before

    def _check_near_tie(self, job: Job, choice: int, expected: list[int], found: list[int]) -> None:
        pairs = enumerate(zip(expected, found, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), None)
        assert first is not None, "the same tokens, but not as many"
        scores = self.scores(job, choice, expected[:first])
        gap = float((scores[expected[first]] - scores[found[first]]).abs())
        assert gap < self.near_tie, f"differs at output {first} of choice {choice} by {gap}"
        self.num_near_ties += 1

    @torch.inference_mode()
    def scores(self, job: Job, choice: int, output_ids: Seq[int]) -> torch.Tensor:
        """(vocab_size,): the scores by which the sampler chooses the next token, computed alone in
        one step."""
        params = job.params
        token_ids = [*job.prompt_ids, *output_ids]
        sequence = Sequence(
            *("judged", 1, choice, job.tenant, job.lane),
            token_ids=token_ids,
            num_prompt=len(job.prompt_ids),
            params=params,
            ending_ids=ending_token_ids(params, self.runner.eos_token_ids),
            block_ids=list(range(-(-len(token_ids) // self.runner.block_size))),
        )
        logits = self.runner.logits([Chunk(sequence, 0, len(token_ids), samples=True)])
        scores = adjust_logits(logits[-1:].float(), [sequence])
        if params.temperature > 0:
            scores = scores / params.temperature
            add_gumbel_noise(scores, [row_key(params.seed, choice, len(output_ids))])
        return scores[0]


def same_logprobs(found: Seq[TokenLogprob], expected: Seq[TokenLogprob]) -> bool:
    """The same tokens with equal log probabilities, except for rounding."""
    if [one.token_id for one in found] != [one.token_id for one in expected]:
        return False
    pairs = [
        (a, b)
        for ours, theirs in zip(found, expected, strict=True)
        for a, b in zip(_values(ours), _values(theirs), strict=True)
    ]
    return all(abs(a - b) < LOGPROB_TOLERANCE for a, b in pairs)


def _values(one: TokenLogprob) -> list[float]:
    return [one.logprob, *(logprob for _, logprob in one.top)]
