"""vLLM's samplers and its state of requests, driven as vLLM's model runner drives them: with the
kernels that lay out a step, verify drafts and keep what was sampled."""

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.worker.gpu import input_batch
from vllm.v1.worker.gpu.sample import sampler
from vllm.v1.worker.gpu.sample import states as sampling_states
from vllm.v1.worker.gpu.sample.logits_processor import (
    build_custom_logits_processors,
    build_custom_logits_processors_params_validator,
)
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.states import RequestState

from workers.engine import sequence as engine_sequence
from workers.vllm_engine.sampling import Sampling

NUM_SLOTS = 8
_LENGTH = 256  # of a context
_CPU = torch.device("cpu")

# Triton's interpreter takes no other masks, and combines some of vLLM's into integers.
_load = interpreter._interpreter.load
interpreter._interpreter.load = lambda places, mask, *rest: _load(places, mask.astype(bool), *rest)

# Triton's interpreter fails in the kernel.
for module in (sampler, sampling_states):
    module.apply_top_k_top_p = lambda logits, k, p, **_: apply_top_k_top_p_pytorch(logits, k, p)

_READS = (Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.cpu, Tensor.nonzero, Tensor.__bool__)


class _Event:
    """A CUDA event that remembers its wait."""

    newest: "_Event"

    def __init__(self, blocking: bool) -> None:
        self.is_recorded = self.is_awaited = False
        _Event.newest = self

    def record(self) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded
        self.is_awaited = True


torch.cuda.Event = _Event  # type: ignore[assignment,misc]


class _NoWait(TorchFunctionMode):
    """Fails where the host would wait for a forward: it may read what it has made itself, and a
    copy after its event."""

    def __init__(self) -> None:
        super().__init__()
        self.made: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.copied: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _READS:
            [tensor] = args
            is_awaited = any(tensor is each for each in self.copied) and _Event.newest.is_awaited
            assert is_awaited or any(tensor is each for each in self.made), function
        found = function(*args, **kwargs)
        if function is Tensor.to and args[1:] == ("cpu",):
            assert kwargs == {"non_blocking": True}
            self.copied.add(found)
        elif function in (torch.full, torch.tensor) and "device" not in kwargs:
            self.made.add(found)
        return found


# The logits (1, vocab_size) after a sequence and the first tokens of its draft.
Model = Callable[[engine_sequence.Sequence, Sequence[int]], torch.Tensor]
# The draft for a sequence.
Proposal = Callable[[engine_sequence.Sequence], Sequence[int]]


class Runner:
    """A step computes some of the requests: a whole prompt, or the last token and a draft."""

    def __init__(self, config: Any, sampling: Sampling, propose: Proposal | None = None) -> None:
        """Without `propose`, vLLM's n-gram speculator proposes, if the configuration has one."""
        self.config, self._sampling, self._propose = config, sampling, propose
        self.vocab_size: int = config.model_config.get_vocab_size()
        self.num_accepted = self.num_refused = 0  # tokens of drafts
        self._max_drafts: int = config.num_speculative_tokens
        self.state = RequestState(NUM_SLOTS, _LENGTH, 512, self._max_drafts, self.vocab_size, _CPU)
        assert sampling.processor is not None
        self._validate = build_custom_logits_processors_params_validator([sampling.processor])
        [self.processor] = build_custom_logits_processors(
            config, self.state, False, (sampling.processor,)
        )
        self._watch(self.processor)
        self._sampler = sampler.Sampler(
            config,
            NUM_SLOTS,
            self.vocab_size,
            _CPU,
            self.state,
            custom_logits_processors=[self.processor],
        )
        self._verifier: Any = None
        self._speculator: Any = None
        if self._max_drafts:
            self._verifier = RejectionSampler(self._sampler, config.speculative_config, _CPU)
            if propose is None:
                from vllm.v1.worker.gpu.spec_decode import init_speculator

                self._speculator = init_speculator(config, _CPU, self.state)
        self.sequences: dict[int, engine_sequence.Sequence] = {}  # by slot
        self._num_computed: dict[int, int] = {}

    def _watch(self, processor: Any) -> None:
        no_wait = _NoWait()
        for name in ("apply_staged_writes", "apply"):
            method = getattr(processor, name)

            def watched(*args: Any, method: Any = method) -> Any:
                with no_wait:
                    return method(*args)

            setattr(processor, name, watched)

    def add(self, name: str, sequence: engine_sequence.Sequence) -> int:
        """Adds a request as HostedEngine and vLLM's own check of requests do; returns its slot."""
        asked = VllmParams(
            max_tokens=sequence.params.max_tokens - sequence.num_output,
            stop_token_ids=sorted(sequence.ending_ids),
            ignore_eos=True,
            detokenize=False,
            **self._sampling.arguments(sequence),
        )
        config = self.config
        asked.verify(
            config.model_config,
            config.speculative_config,
            config.structured_outputs_config,
            None,
        )
        self._validate(asked)
        known = len(sequence.token_ids)
        self.state.add_request(name, known, list(sequence.token_ids), 0, asked.max_tokens)
        slot: int = self.state.req_id_to_index[name]
        self._sampler.add_request(slot, asked.clone())
        self.sequences[slot], self._num_computed[slot] = sequence, 0
        return slot

    def remove(self, name: str) -> None:
        del self.sequences[self.state.remove_request(name)]

    def step(self, slots: Sequence[int], model: Model) -> dict[int, list[int]]:
        """Returns the tokens of each slot, which it also appends to its sequence."""
        self.state.apply_staged_writes()
        self._sampler.apply_staged_writes()
        drafts = [self.draft_of(slot) for slot in slots]
        batch = self._batch(slots, [len(draft) for draft in drafts])
        logits = torch.cat(
            [
                model(self.sequences[slot], draft[:number])
                for slot, draft in zip(slots, drafts, strict=True)
                for number in range(len(draft) + 1)
            ]
        )
        sample = self._verifier if any(drafts) else self._sampler
        output = sample(logits, batch)
        self._keep(batch, output)
        tokens = {}
        for slot, draft, ids, number in zip(
            slots,
            drafts,
            output.sampled_token_ids.tolist(),
            output.num_sampled.tolist(),
            strict=True,
        ):
            self.num_accepted += number - 1
            self.num_refused += len(draft) - (number - 1)
            tokens[slot] = ids[:number]
            self.sequences[slot].token_ids += ids[:number]
            self._num_computed[slot] = len(self.sequences[slot].token_ids) - 1
        if self._max_drafts:
            self._draft_next(batch, output)
        return tokens

    def draft_of(self, slot: int) -> list[int]:
        """The tokens that vLLM verifies for a slot in this step."""
        if self._num_computed[slot] == 0:
            return []
        draft: list[int] = self.state.draft_tokens[slot].tolist()
        return draft[: draft.index(-1)] if -1 in draft else draft

    def _batch(self, slots: Sequence[int], num_drafts: list[int]) -> Any:
        """The step's layout, made by vLLM's kernels as in its `prepare_inputs`."""
        state = self.state
        slot_ids = np.array(slots, dtype=np.int32)
        ends = np.array([len(self.sequences[slot].token_ids) for slot in slots]) + num_drafts
        lengths = ends - [self._num_computed[slot] for slot in slots]
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        rows = np.concatenate(([0], np.cumsum(np.array(num_drafts) + 1))).astype(np.int32)
        mapping = torch.from_numpy(slot_ids)
        start_loc, cu_num_logits = torch.from_numpy(starts), torch.from_numpy(rows)
        input_ids = torch.zeros(int(starts[-1]), dtype=torch.int32)
        positions = torch.zeros(int(starts[-1]), dtype=torch.int64)
        seq_lens = torch.zeros(NUM_SLOTS, dtype=torch.int32)
        input_batch.prepare_prefill_inputs(
            input_ids,
            state.next_prefill_tokens,
            mapping,
            start_loc,
            state.all_token_ids.gpu,
            state.prefill_len.gpu,
            state.num_computed_tokens.gpu,
        )
        input_batch.prepare_pos_seq_lens(
            mapping, start_loc, state.num_computed_tokens.gpu, positions, seq_lens
        )
        logits_indices = input_batch.combine_sampled_and_draft_tokens(
            input_ids,
            mapping,
            state.last_sampled_tokens,
            start_loc,
            seq_lens,
            state.prefill_len.gpu,
            state.draft_tokens,
            cu_num_logits,
            int(rows[-1]),
        )
        expanded, local = mapping, torch.zeros(len(slots), dtype=torch.int32)
        if any(num_drafts):
            expanded, local = input_batch.expand_idx_mapping(
                mapping, int(rows[-1]), cu_num_logits, self._max_drafts + 1
            )
        return SimpleNamespace(
            num_reqs=len(slots),
            idx_mapping=mapping,
            idx_mapping_np=slot_ids,
            expanded_idx_mapping=expanded,
            expanded_local_pos=local,
            input_ids=input_ids,
            positions=positions,
            logits_indices=logits_indices,
            cu_num_logits=cu_num_logits,
            cu_num_logits_np=rows,
            query_start_loc=start_loc,
            seq_lens=seq_lens[: len(slots)],
            seq_lens_cpu_upper_bound=torch.from_numpy(ends),
        )

    def _keep(self, batch: Any, output: Any) -> None:
        state = self.state
        input_batch.post_update(
            batch.idx_mapping,
            state.num_computed_tokens.gpu,
            state.last_sampled_tokens,
            self._sampler.penalties_state.output_bin_counts,
            output.sampled_token_ids,
            output.num_sampled,
            output.num_rejected,
            batch.query_start_loc,
            state.all_token_ids.gpu,
            state.total_len.gpu,
        )

    def _draft_next(self, batch: Any, output: Any) -> None:
        slots = batch.idx_mapping.long()
        if self._speculator is not None:
            drafts = self._speculator.propose(
                batch,
                None,
                None,
                None,
                None,
                output.num_sampled,
                output.num_rejected,
                self.state.last_sampled_tokens,
                self.state.next_prefill_tokens,
                None,
                None,
            )
        else:
            assert self._propose is not None
            drafts = torch.full((len(slots), self._max_drafts), -1)
            for place, slot in enumerate(slots.tolist()):
                draft = self._propose(self.sequences[slot])
                drafts[place, : len(draft)] = torch.tensor(draft, dtype=torch.int64)
        self.state.draft_tokens[slots] = drafts
