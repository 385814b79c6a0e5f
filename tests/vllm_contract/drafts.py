"""What batchway uses of vLLM beside speculative decoding: our processor with rows for drafts.

Methods of drafting are configured as operators do. Their models need a GPU, so drafts come from
vLLM's n-gram speculator, or are made here: right ones, wrong ones, and such that a grammar refuses.
"""

import json
import random
import shutil
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm
from msgspec.structs import replace
from tokenizers import Tokenizer
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

from contract.errors import ErrorCode
from tests.vllm_contract.runner import NUM_SLOTS, Runner
from tests.vllm_contract.sequences import (
    KINDS,
    NUM_TOKENS,
    PROMPT,
    Scores,
    masks_of,
    own_token,
    sequence_of,
)
from workers.engine.grammar import Grammars
from workers.engine.sequence import RequestRefused, Sequence
from workers.ipc.messages import EngineOptions
from workers.model.sampler import adjust_logits, find_allowed
from workers.vllm_engine.load import engine_args, engine_config
from workers.vllm_engine.sampling import Sampling, grammars_of, sampling_of

_NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
_NUM_DRAFTED = 4
_NUM_WALKS, _NUM_BATCHES = 5, 200
_MOST_OF_SCHEMA = 150  # tokens
_SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_old": {"type": "boolean"},
        "parts": {"type": "array", "items": {"enum": ["lid", "rim"]}, "maxItems": 3},
    },
    "required": ["colour", "size", "is_old", "parts"],
    "additionalProperties": False,
}
_JSON = json.dumps({"grammars": [{"json_schema": _SCHEMA}]})


def check_drafts(model: str) -> None:
    """Runs each check for the methods that this release drafts with; raises what fails."""
    ngram = _config(model, _NGRAM)
    if ngram.use_v2_model_runner:
        _check_kinds(ngram, own_drafts=False)
        _check_schema(ngram, own_drafts=False)
    else:  # as vLLM 0.31
        _check_old_runner(ngram)
    trained = [
        _config(model, {"method": "eagle3", "model": model}),
        _config(model, {"method": "draft_model", "model": model}),
        _config(_with_mtp(model), {"method": "mtp"}),
    ]
    for config in trained:
        assert config.use_v2_model_runner
        assert not sampling_of(config).keeps_noise
    _check_kinds(trained[0], own_drafts=True)
    _check_schema(trained[0], own_drafts=True)
    num_tokens = sum(_check_walk(trained[0], seed) for seed in range(_NUM_WALKS))
    runner = "new" if ngram.use_v2_model_runner else "old"
    num_rows = sum(_check_rows(trained[0], seed) for seed in range(_NUM_BATCHES))
    print(
        f"vLLM {vllm.__version__}: {num_tokens} tokens as without drafts, {num_rows} rows as one "
        f"by one; n-grams on its {runner} runner"
    )


def _config(model: str, method: dict[str, Any]) -> Any:
    given = json.dumps(method | {"num_speculative_tokens": _NUM_DRAFTED})
    options = EngineOptions(
        model_path=model,
        max_num_seqs=NUM_SLOTS,
        prefix_caching=True,
        engine_args={"speculative_config": given},
    )
    return engine_config(engine_args(options))


def _with_mtp(model: str) -> str:
    """A folder with the configuration of a model that drafts itself, and no weights."""
    folder = f"{model}-{vllm.__version__}-mtp"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = Path(folder, "config.json")
    changes = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_nextn_predict_layers": 1,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def _check_old_runner(config: Any) -> None:
    """It takes no processor beside speculation, and a job that needs one is refused."""
    sampling = sampling_of(config)
    assert sampling.processor is None
    assert config.model_config.logits_processors is None
    for params in ({"min_p": 0.1}, {"logit_bias": {7: 1.0}}):
        assert _refusal_code(sampling, sequence_of(params)) is ErrorCode.BAD_PARAMETER


def _refusal_code(sampling: Sampling, sequence: Sequence) -> ErrorCode | None:
    try:
        sampling.arguments(sequence)
    except RequestRefused as refusal:
        return refusal.code
    return None


def _grammars(config: Any) -> Grammars:
    grammars = grammars_of(config)
    assert grammars is not None
    return grammars


class _Drafts:
    """Proposes the tokens that would follow without a grammar, penalties or biases, and changes or
    cuts some."""

    def __init__(self, seed: int, scores: Scores, likely: Seq[int] = ()) -> None:
        self._random, self._scores, self._likely = random.Random(seed), scores, likely

    def __call__(self, sequence: Sequence) -> list[int]:
        draft: list[int] = []
        follows = self._likely[sequence.num_output :]
        for number in range(self._random.randrange(_NUM_DRAFTED + 1)):
            token_id = int(self._scores(sequence, draft).argmax())
            if number < len(follows) and self._random.random() < 0.8:
                token_id = follows[number]
            if self._random.random() < 0.15:
                token_id = self._random.randrange(self._scores.vocab_size)
            draft.append(token_id)
        return draft


def _reference(
    params: dict[str, Any], scores: Scores, grammars: Grammars, num_tokens: int
) -> list[int]:
    """The output of a greedy choice, token by token by batchway's own sampler."""
    sequence = sequence_of(params, num_tokens=num_tokens)
    while sequence.num_output < num_tokens and not _is_whole(sequence, grammars):
        sequence.token_ids.append(own_token(scores(sequence), sequence, grammars))
    return sequence.token_ids[sequence.num_prompt :]


def _is_whole(sequence: Sequence, grammars: Grammars) -> bool:
    params, output = sequence.params, sequence.token_ids[sequence.num_prompt :]
    return bool(params.grammar) and grammars.matcher(params.grammar, output).is_complete


def _has_ended(sequence: Sequence) -> bool:
    """Whether an ending token is in its output; greedy ones go on, to have more to compare."""
    is_greedy = sequence.params.temperature == 0.0
    return not is_greedy and 1 in sequence.token_ids[sequence.num_prompt :]


def _check_kinds(config: Any, own_drafts: bool) -> None:
    """Greedy choices have the tokens that they have without drafts, also after a resume; those of
    others are among the ones that their parameters allow."""
    grammars = _grammars(config)
    num_accepted = num_refused = 0
    for number, (kind, params) in enumerate(_kinds().items()):
        is_greedy = params["temperature"] == 0.0
        scores = Scores(number, grammars.vocab_size)
        expected = _reference(params, scores, grammars, NUM_TOKENS) if is_greedy else []
        for cut in (0, 7) if is_greedy and own_drafts else (0,):
            drafts = _Drafts(number, scores, expected) if own_drafts else None
            runner = Runner(config, sampling_of(config), drafts)
            sequence = sequence_of(params, PROMPT + expected[:cut])
            other = sequence_of(KINDS["penalties"])
            slots = [runner.add("other", other), runner.add("choice", sequence)]
            while sequence.num_output < NUM_TOKENS and not _has_ended(sequence):
                before = len(sequence.token_ids)
                runner.step(slots, scores)
                if not is_greedy:
                    _check_allowed(kind, sequence, before, scores, grammars)
            if is_greedy:
                assert sequence.token_ids[len(PROMPT) :][:NUM_TOKENS] == expected, (kind, cut)
            num_accepted += runner.num_accepted
            num_refused += runner.num_refused
    assert num_refused > 10, "no draft is refused: this check is blind"
    assert num_accepted > 10 or not own_drafts, "no draft is accepted: this check is blind"


def _kinds() -> dict[str, dict[str, Any]]:
    grammar = KINDS["grammar"]["grammar"]
    return KINDS | {
        "min-p": {"temperature": 2.0, "min_p": 0.3},
        "suppressed": {"temperature": 1.0, "logit_bias": dict.fromkeys(range(60, 76), -100.0)},
        "all": {
            "temperature": 1.2,
            "min_p": 0.05,
            "top_p": 0.9,
            "logit_bias": {70: 5.0, 71: -100.0},
            "frequency_penalty": 0.5,
            "presence_penalty": 0.5,
            "repetition_penalty": 1.3,
            "grammar": grammar,
        },
    }


def _check_allowed(
    kind: str, sequence: Sequence, first: int, scores: Scores, grammars: Grammars
) -> None:
    """Each of the new tokens is one that batchway's own sampler may draw."""
    params = sequence.params
    for place in range(first, len(sequence.token_ids)):
        past = sequence_of({}, sequence.token_ids[:place])
        past.params = params
        if _has_ended(past):
            return
        logits = adjust_logits(scores(past), [past], masks_of(past, grammars))
        logits = logits / params.temperature
        allowed = find_allowed(
            logits,
            torch.tensor([params.top_k]),
            torch.tensor([params.top_p]),
            torch.tensor([params.min_p]),
        )
        token_id = sequence.token_ids[place]
        assert logits[0, token_id] >= allowed.lowest[0, 0] - 1e-3, (kind, place, token_id)
        assert logits[0, token_id].isfinite(), (kind, place, token_id)


def _check_schema(config: Any, own_drafts: bool) -> None:
    """Outputs of a JSON schema are whole and valid; the greedy ones are as without drafts."""
    grammars = _grammars(config)
    tokenizer = Tokenizer.from_file(f"{config.model_config.model}/tokenizer.json")
    example = '{"colour":"red","size":7,"is_old":true,"parts":["lid","rim"]}'
    likely = tokenizer.encode(example).ids
    num_accepted = num_refused = 0
    for seed in range(6):
        params = {"temperature": float(seed % 2), "grammar": _JSON}
        scores = Scores(seed, grammars.vocab_size)
        runner = Runner(
            config, sampling_of(config), _Drafts(seed, scores, likely) if own_drafts else None
        )
        sequence = sequence_of(params, likely, _MOST_OF_SCHEMA, num_prompt=len(likely))
        expected = sequence_of(params, likely, _MOST_OF_SCHEMA, num_prompt=len(likely))
        slot = runner.add("choice", sequence)
        matcher = grammars.matcher(_JSON)
        output: list[int] = []
        while not matcher.is_complete:
            for token_id in runner.step([slot], scores)[slot]:
                if not matcher.is_complete:  # the engine aborts the request then
                    if not seed % 2:
                        assert token_id == own_token(scores(expected), expected, grammars)
                    matcher.consume(token_id)
                    expected.token_ids.append(token_id)
                    output.append(token_id)
        value = json.loads(tokenizer.decode(output))
        assert list(value) == _SCHEMA["required"], value
        assert value["colour"] in ("red", "green", "blue"), value
        assert 0 <= value["size"] <= 99, value
        num_accepted += runner.num_accepted
        num_refused += runner.num_refused
    assert num_accepted, "no draft is accepted: this check is blind"
    assert num_refused, "no draft is refused: this check is blind"


def _check_walk(config: Any, seed: int) -> int:
    """Random choices come, wait, leave and return. A step takes what batchway's own sampler takes
    one by one: the draft up to where it differs, and one token more. Returns their number."""
    choose, grammars = random.Random(seed), _grammars(config)
    scores = Scores(seed, grammars.vocab_size)
    runner = Runner(config, sampling_of(config), _Drafts(seed, scores))
    names: dict[str, int] = {}
    num_tokens = 0
    for number in range(12):
        if len(names) < NUM_SLOTS and choose.random() < 0.6:
            params = _random_params(choose)
            output = _reference(params, scores, grammars, choose.choice((0, 0, 5)))
            sequence = sequence_of(params, PROMPT + output, 100)
            if not _is_whole(sequence, grammars):
                names[f"choice {number}"] = runner.add(f"choice {number}", sequence)
        if names and choose.random() < 0.2:  # as when vLLM is short of blocks
            name = choose.choice(list(names))
            sequence = runner.sequences[names[name]]
            runner.remove(name)
            names[name] = runner.add(name, sequence)
        slots = choose.sample(list(names.values()), choose.randint(0, len(names)))
        if not slots:
            continue
        expected = {slot: _one_by_one(runner, slot, scores, grammars) for slot in slots}
        found = runner.step(slots, scores)
        for slot, token_ids in expected.items():
            sequence = runner.sequences[slot]
            assert found[slot][: len(token_ids)] == token_ids, (seed, number, sequence.params)
            is_whole = _is_whole(
                sequence_of(
                    {"grammar": sequence.params.grammar},
                    sequence.token_ids[
                        : len(sequence.token_ids) - len(found[slot]) + len(token_ids)
                    ],
                ),
                grammars,
            )
            assert is_whole or len(found[slot]) == len(token_ids)
            num_tokens += len(token_ids)
            if is_whole:
                [name] = [name for name in names if names[name] == slot]
                runner.remove(name)
                del names[name]
    return num_tokens


def _one_by_one(runner: Runner, slot: int, scores: Scores, grammars: Grammars) -> list[int]:
    """The tokens of the slot's next step; none after the end of its grammar."""
    known = runner.sequences[slot]
    past = sequence_of({}, known.token_ids, 100)
    past.params = known.params
    token_ids: list[int] = []
    for drafted in [*runner.draft_of(slot), None]:
        if _is_whole(past, grammars):
            break
        token_ids.append(own_token(scores(past), past, grammars))
        past.token_ids.append(token_ids[-1])
        if token_ids[-1] != drafted:
            break
    return token_ids


def _check_rows(config: Any, seed: int) -> int:
    """Each row of a random batch has the logits that batchway's own sampler makes of them, up to a
    drafted token that its grammar refuses. Without Triton, so for many. Returns their number."""
    choose, grammars = random.Random(seed), _grammars(config)
    sampling, scores = sampling_of(config), Scores(seed, grammars.vocab_size)
    propose = _Drafts(seed, scores)
    runner = Runner(config, sampling, propose)
    state, choices, num_checked = runner.state, dict[int, Sequence](), 0
    for slot in range(choose.randint(1, NUM_SLOTS)):
        params = _random_params(choose)
        output = _reference(params, scores, grammars, choose.choice((0, 3, 9)))
        choices[slot] = sequence_of(params, PROMPT + output, 100)
        runner.processor.add_request(slot, VllmParams(**sampling.arguments(choices[slot])))
        state.prefill_len.np[slot] = len(choices[slot].token_ids)
    for _ in range(6):
        drafts: dict[int, list[int]] = {}
        for slot, sequence in choices.items():
            drafts[slot] = propose(sequence)
            known = torch.tensor(sequence.token_ids)
            state.all_token_ids.gpu[slot, : len(known)] = known
            state.total_len.gpu[slot] = len(known)
            state.draft_tokens[slot] = torch.tensor([*drafts[slot], *[-1] * _NUM_DRAFTED])[
                :_NUM_DRAFTED
            ]
        slots = choose.sample(list(choices), choose.randint(1, len(choices)))
        drafts |= {slot: drafts[slot][: choose.randint(0, _NUM_DRAFTED)] for slot in slots}
        runner.processor.apply_staged_writes()
        rows = [(slot, number) for slot in slots for number in range(1 + len(drafts[slot]))]
        inputs = [[choices[slot].token_ids[-1], *drafts[slot]][number] for slot, number in rows]
        places = [len(choices[slot].token_ids) - 1 + number for slot, number in rows]
        logits = torch.cat([scores(choices[slot], drafts[slot][:number]) for slot, number in rows])
        context = LogitsContext(
            expanded_idx_mapping=torch.tensor([slot for slot, _ in rows], dtype=torch.int32),
            idx_mapping=torch.tensor(slots, dtype=torch.int32),
            idx_mapping_np=np.array(slots, dtype=np.int32),
            expanded_local_pos=torch.tensor([number for _, number in rows], dtype=torch.int32),
            input_ids=torch.tensor(inputs, dtype=torch.int32),
            pos=torch.tensor(places),
            seq_lens_upper_bound_np=np.array(
                [len(choices[slot].token_ids) + len(drafts[slot]) for slot in slots]
            ),
        )
        found = runner.processor.apply(logits.clone(), context)
        by_slot: dict[int, list[torch.Tensor]] = {slot: [] for slot in slots}
        for row, (slot, _) in enumerate(rows):
            by_slot[slot] += [logits[row], found[row]]
        for slot in slots:
            sequence = choices[slot]
            new_ids = _check_slot(sequence, drafts[slot], by_slot[slot], grammars)
            num_checked += len(new_ids)
            sequence.token_ids += new_ids
            if _is_whole(sequence, grammars):
                del choices[slot]
        if not choices:
            break
    return num_checked


def _check_slot(
    sequence: Sequence, draft: Seq[int], logits: Seq[torch.Tensor], grammars: Grammars
) -> list[int]:
    """`logits` before and after the processor, row by row. Returns the tokens of the step."""
    params = sequence.params
    past = sequence_of({}, sequence.token_ids, 100)
    # vLLM's own stages have applied the others.
    past.params = replace(params, logit_bias={}, repetition_penalty=1.0)
    new_ids: list[int] = []
    for number, drafted in enumerate([*draft, None]):
        if _is_whole(past, grammars):
            break
        before, after = logits[2 * number : 2 * number + 2]
        expected = adjust_logits(before[None], [past], masks_of(past, grammars))[0]
        torch.testing.assert_close(after, expected)
        is_allowed = drafted is not None and bool(after[drafted].isfinite())
        new_ids.append(drafted if is_allowed and drafted is not None else int(after.argmax()))
        past.token_ids.append(new_ids[-1])
        if not is_allowed:
            break
    return new_ids


def _random_params(choose: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": 0.0}
    if choose.random() < 0.7:
        rule = " ".join(_random_piece(choose) for _ in range(choose.randint(1, 4)))
        params["grammar"] = json.dumps({"grammars": [{"lark_grammar": f"start: {rule}"}]})
    if choose.random() < 0.3:
        params["frequency_penalty"] = choose.uniform(-1.0, 2.0)
        params["presence_penalty"] = choose.uniform(-1.0, 2.0)
    if choose.random() < 0.2:
        params["repetition_penalty"] = choose.uniform(0.8, 1.8)
    if choose.random() < 0.3:
        params["logit_bias"] = {choose.randrange(4, 260): choose.uniform(-9, 9) for _ in range(9)}
    return params


def _random_piece(choose: random.Random) -> str:
    """A part of a rule of Lark, with at least one character."""
    letters = "".join(choose.sample("abcdefgh0123456789", choose.randint(1, 6)))
    least = choose.randint(1, 4)
    words = " | ".join(f'"{letters[:n]}"' for n in range(1, len(letters) + 1))
    return choose.choice(
        (f"/[{letters}]{{{least},{least + 3}}}/", f"({words})", f'/[^{letters}"]/', f"({words})+")
    )
