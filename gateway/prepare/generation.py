"""Turns a chat or a completion into a job: tokenises it, checks it against the model, chooses its
sampling parameters, computes its cost.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from contract.function_types import Submission
from contract.jobs import Job, SamplingParams, default_seed
from contract.model_cards import GenerationDefaults, ModelCard, TokenizerFiles
from gateway.grammars.compiler import Constraint
from gateway.grammars.rules.arguments import string_parameters
from gateway.http.errors import (
    UNSUPPORTED,
    ApiError,
    ContextExceeded,
    TemplateRefused,
    bad_request,
    invalid_value,
)
from gateway.models.past_calls import Rendered, one_call_each
from gateway.models.tokens import Cut, ModelTokenizer, NoRoom, Over, TooLong, tokenised
from gateway.prepare.images import check_marks, read_images
from gateway.prepare.schemas import (
    MAX_CHOICES,
    MAX_LISTED_IDS,
    ChatBody,
    CompletionBody,
    Effort,
    Function,
    GenerationBody,
    no_room,
)
from gateway.settings import GatewaySettings
from gateway.state import Gateway

BUDGET = "thinking_token_budget"
Prompts = tuple[tuple[int, ...], ...]

# The numbers that a caller or its model may set, with OpenAI's defaults.
_DEFAULTS: Mapping[str, float] = {
    field.name: field.default
    for field in msgspec.structs.fields(SamplingParams)
    if field.name in GenerationDefaults.__struct_fields__ and field.name != "top_k"
}

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


def reasoning_of(
    tokenizer: ModelTokenizer, card: ModelCard, prompt_ids: Sequence[int], budget: int | None
) -> dict[str, Any] | None:
    """Returns a frames.Reasoning; None if the model does not reason. Raises ApiError for a budget
    that cannot be enforced."""
    format_ = tokenizer.files.reasoning
    if budget is not None:
        _check_budget(tokenizer, card)
    if format_ is None:
        return None
    state = format_.state_after(tokenizer.end_of(prompt_ids))
    is_bounded = state != "closed"
    return {
        "format": msgspec.structs.asdict(format_),
        "state": state,
        "budget": budget if is_bounded else None,
    }


def _check_budget(tokenizer: ModelTokenizer, card: ModelCard) -> None:
    format_ = tokenizer.files.reasoning
    if format_ is None:
        fault = "does not reason"
    elif not card.capabilities.structured_output:
        fault = "has an engine that cannot constrain its output"
    elif not format_.close.lstrip().startswith(tuple(tokenizer.marks["ids"])):
        fault = "ends its reasoning with text, which no token marks"
    else:
        return
    raise bad_request(UNSUPPORTED, f"{BUDGET}: {card.name!r} {fault}", BUDGET)


def sampling_params(
    card: ModelCard, body: GenerationBody, caps: list[int], job_id: str
) -> SamplingParams:
    """Returns the parameters for all prompts: the caller's, else the model's, else OpenAI's. Their
    maxima differ because the engine also ends each choice at the end of the context."""
    min_tokens = body.min_tokens or 0
    most = 0 if body.max_tokens == 0 else min(caps)
    if min_tokens > most:
        raise invalid_value("min_tokens", f"min_tokens is over max_tokens, {most}")
    own = card.generation
    chosen: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        given, of_model = getattr(body, name), getattr(own, name)
        of_model = default if of_model is None else of_model
        chosen[name] = float(of_model if given is None else given)
    stop_token_ids = tuple(body.stop_token_ids or ())
    check_ids("stop_token_ids", stop_token_ids, card)
    allowed_ids = tuple(dict.fromkeys(body.allowed_token_ids or ()))
    check_ids("allowed_token_ids", allowed_ids, card)
    if min_tokens and allowed_ids and {*card.eos_token_ids, *stop_token_ids} >= {*allowed_ids}:
        raise invalid_value("allowed_token_ids", "allowed_token_ids end the output at once")
    return SamplingParams(
        max_tokens=max(caps),
        # The engine's seeds have 63 bits.
        seed=default_seed(job_id) if body.seed is None else body.seed % 2**63,
        varies_seed=body.seed is None and len(caps) > 1,
        min_tokens=min_tokens,
        expected_tokens=_expected_tokens(body, max(caps)),
        **chosen,
        top_k=max(0, body.top_k if body.top_k is not None else own.top_k or 0),
        logit_bias=_logit_bias(card, body),
        n=body.n or 1,
        stop=body.stop or (),
        stop_token_ids=stop_token_ids,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        allowed_token_ids=allowed_ids,
        skip_special_tokens=body.skip_special_tokens is not False,
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.num_logprobs,
        prompt_logprobs=num_prompt_logprobs(body),
    )


def echoes(body: GenerationBody) -> bool:
    return isinstance(body, CompletionBody) and bool(body.echo)


def num_prompt_logprobs(body: GenerationBody) -> int | None:
    """The larger of two numbers: for `prompt_logprobs`, and for the log probabilities of
    an echo."""
    echoed = body.num_logprobs if echoes(body) else None
    return max((n for n in (body.prompt_logprobs, echoed) if n is not None), default=None)


def _expected_tokens(body: GenerationBody, most: int) -> int:
    """The length of a choice as stated by its body; 0 if it is not stated."""
    if body.ignore_eos:
        return most  # what else may end it is its caller's, who may name what never comes
    expected = body.expected_output_tokens
    return min(max(expected, body.min_tokens or 0), most) if expected else 0


def _logit_bias(card: ModelCard, body: GenerationBody) -> dict[int, float]:
    """Returns the model's suppressed tokens and the caller's biases, which take precedence."""
    biases = dict.fromkeys(card.generation.suppress_tokens, -100.0)
    for name, bias in (body.logit_bias or {}).items():
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise invalid_value("logit_bias", "keys of logit_bias must be token ids")
        if int(name) >= card.vocab_size:
            message = f"token ids of logit_bias must be below {card.vocab_size}"
            raise invalid_value("logit_bias", message)
        biases[int(name)] = float(bias)
    return biases


def bad_word_ids(tokenizer: ModelTokenizer, body: GenerationBody) -> tuple[tuple[int, ...], ...]:
    """The token ids of words at a text's start and within it, as in vLLM. Raises ApiError."""
    found = list[tuple[int, ...]]()
    for number, word in enumerate(body.bad_words or ()):
        texts = word.lstrip(), f" {word.lstrip()}"
        first, inner = tokenizer.encode_each(texts, None, adds_special_tokens=False)
        if isinstance(first, Over) or isinstance(inner, Over) or not first:
            raise invalid_value(f"bad_words.{number}", "bad_words: a word has no tokens")
        found.append(tuple(first))
        if len(inner) == len(first) and inner[0] != first[0]:
            found.append(tuple(inner))
    if sum(map(len, found)) > MAX_LISTED_IDS:
        raise invalid_value("bad_words", f"bad_words have over {MAX_LISTED_IDS} tokens")
    return tuple(found)


async def prepare_generation(
    gateway: Gateway,
    card: ModelCard,
    tokenizer: ModelTokenizer,
    body: GenerationBody,
    job: Job,
    submission: Submission,
) -> tuple[Job, Submission]:
    """Returns the job with its prompts and parameters, and its submission. Raises ApiError."""
    functions = [tool.function for tool in body.offered] if isinstance(body, ChatBody) else []
    constraint = body.constraint
    _check_capabilities(card, body, functions, constraint)
    images, num_image_tokens = tuple[bytes, ...](), 0
    if isinstance(body, ChatBody):
        images, num_image_tokens = await read_images(gateway, card, body, job.tenant)
    prompts, num_cut = await prompts_of(tokenizer, card, body)
    if echoes(body):
        most = gateway.settings.max_body_bytes
        await _check_echo(tokenizer, prompts, body.n or 1, most)
    lengths = [len(prompt_ids) + num_image_tokens for prompt_ids in prompts]
    caps = _output_caps(gateway.settings, card, body, lengths)
    params = sampling_params(card, body, caps, job.id)
    params = msgspec.structs.replace(params, bad_words=bad_word_ids(tokenizer, body))
    if isinstance(body, ChatBody):
        if functions:
            if constraint is not None:  # its faults, by its own name
                await gateway.grammars.compile(constraint)
            constraint = _tool_constraint(tokenizer, card, body, functions)
        reasoning = reasoning_of(tokenizer, card, prompts[0], body.thinking_token_budget)
        budget = None if reasoning is None else reasoning["budget"]
        if constraint is None and budget is not None and budget < max(caps):
            format_ = tokenizer.files.tool_format if functions else None
            calls = None if format_ is None else msgspec.structs.asdict(format_)
            constraint = Constraint(BUDGET, "text", calls)
        if constraint is not None:  # on the answer after the reasoning
            marks = {**tokenizer.marks, "ends": sorted(card.eos_token_ids)}
            constraint = constraint.within({"marks": marks, "reasoning": reasoning})
    if constraint is not None:
        _check_constrained(body, (body.constraint or constraint).param)
        grammar = await gateway.grammars.compile(constraint)
        params = msgspec.structs.replace(params, grammar=grammar)
    # Models that write arguments without quotes do not show which are strings.
    strings = {f.name: string_parameters(f.parameters or {}) for f in functions}
    job = with_prompts(
        job,
        card,
        prompts,
        params=params,
        image_data=images,
        num_image_tokens=num_image_tokens,
        return_token_ids=bool(body.return_token_ids),
        return_tokens_as_token_ids=bool(body.return_tokens_as_token_ids),
        echo=echoes(body),
        shows_output=body.max_tokens != 0,
        prompt_logprobs=body.prompt_logprobs,
        num_cut_tokens=num_cut,
        tools={name: tuple(found) for name, found in strings.items()},
        tool_alternatives={
            name: others
            for name, found in strings.items()
            if (others := {each: kinds for each, kinds in found.items() if kinds})
        },
    )
    max_output_tokens = params.n * sum(caps)
    return job, msgspec.structs.replace(submission, max_output_tokens=max_output_tokens)


def with_prompts(job: Job, card: ModelCard, prompts: Prompts, **fields: Any) -> Job:
    """The job with its prompts and other fields."""
    is_list = len(prompts) > 1
    return msgspec.structs.replace(
        job,
        prompt_ids=() if is_list else prompts[0],
        prompt_list=prompts if is_list else (),
        resume=card.capabilities.resume,
        **fields,
    )


def check_ids(param: str, token_ids: tuple[int, ...], card: ModelCard) -> None:
    """Raises ApiError for ids that the model does not have."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < card.vocab_size):
        own = f"those of the model's own tokenizer, from 0 to {card.vocab_size - 1}"
        raise invalid_value(param, f"{param}: token ids must be {own}")


async def _check_echo(
    tokenizer: ModelTokenizer, prompts: Prompts, num_each: int, max_bytes: int
) -> None:
    """Raises ApiError if the prompts, once in each choice, are longer than a body may be: few
    characters are the ids of tokens with long texts."""

    def echoed() -> int:
        return num_each * sum(len(tokenizer.token_bytes(i)) for ids in prompts for i in ids)

    if (num_bytes := await tokenised(echoed, sum(map(len, prompts)))) > max_bytes:
        message = f"echo: the prompts in all choices have {num_bytes} bytes, over {max_bytes}"
        raise invalid_value("echo", message)


def _check_constrained(body: GenerationBody, param: str) -> None:
    """Raises ApiError for parameters that contradict a grammar, which alone decides where an output
    may end."""
    for name in ("min_tokens", "ignore_eos", "allowed_token_ids"):
        if getattr(body, name):
            raise invalid_value(name, f"{name} cannot be combined with {param}")


def _check_capabilities(
    card: ModelCard,
    body: GenerationBody,
    functions: Sequence[Function],
    constraint: Constraint | None,
) -> None:
    """Raises ApiError if the model's engine cannot do what the body asks for."""
    if functions and not card.capabilities.tools:
        message = f"tools are not supported by {card.name!r}: their format is not known"
        raise bad_request(UNSUPPORTED, message, "tools")
    if constraint is not None and not card.capabilities.structured_output:
        param = constraint.param.split(".")[0]
        message = f"{param}: the engine of {card.name!r} cannot constrain its output"
        raise bad_request(UNSUPPORTED, message, param)
    if num_prompt_logprobs(body) is not None and not card.capabilities.prompt_logprobs:
        param = "echo" if body.prompt_logprobs is None else "prompt_logprobs"
        message = f"{param}: the engine of {card.name!r} gives no log probabilities of prompts"
        raise bad_request(UNSUPPORTED, message, param)


def _tool_constraint(
    tokenizer: ModelTokenizer, card: ModelCard, body: ChatBody, functions: Sequence[Function]
) -> Constraint | None:
    """The constraint on calls, if any. Raises ApiError if calls that must be forced cannot be."""
    format_, can = tokenizer.files.tool_format, card.capabilities.structured_output
    if format_ is not None and can:
        return body.tool_constraint(format_)
    is_strict = any(function.strict for function in functions)
    if body.forces_calls or is_strict or body.constraint is not None:
        param = "tool_choice" if body.forces_calls else "tools"
        reason = "are in a format that no grammar forces" if can else "cannot be constrained"
        raise bad_request(UNSUPPORTED, f"{param}: the calls of {card.name!r} {reason}", param)
    return None


async def prompts_of(
    tokenizer: ModelTokenizer, card: ModelCard, body: GenerationBody, most: int = 0
) -> tuple[Prompts, int | None]:
    """Returns the token ids of each prompt, and how many were cut off, if the call asks for
    cutting. A chat is one prompt. `most`: tokens of one; 0: of the context."""
    given, cut = await _given(tokenizer, card, body)
    num_chars = _num_chars(given)
    encoded = tokenizer.encode_prompts(
        [("", each) for each in given],
        most or card.context_length,
        cut,
        adds=_adds_special_tokens(body),
    )
    try:
        found: list[tuple[list[int], int]] = await tokenised(partial(list, encoded), num_chars)
    except NoRoom:
        raise no_room("prompt") from None
    except TooLong as exc:
        _, num_output = _given_max_tokens(body)
        raise _over_context(card, exc.over, num_output or 0, _name_of(body, exc.number)) from None
    prompts = tuple(tuple(ids) for ids, _ in found)
    for number, prompt_ids in enumerate(prompts):
        param = _name_of(body, number)
        if not prompt_ids:
            raise invalid_value(param, f"{param} has no tokens")
        check_ids(param, prompt_ids, card)
    num_cut = None if cut is None else sum(num for _, num in found)
    return prompts, num_cut


async def count_prompts(tokenizer: ModelTokenizer, card: ModelCard, body: GenerationBody) -> int:
    """Counts the tokens of all prompts, even too long ones; approximate if they are long."""
    given, cut = await _given(tokenizer, card, body)
    return await count_given(tokenizer, given, cut, adds=_adds_special_tokens(body))


def _adds_special_tokens(body: GenerationBody) -> bool:
    asked = body.add_special_tokens
    return not isinstance(body, ChatBody) if asked is None else asked


async def count_given(
    tokenizer: ModelTokenizer,
    given: Sequence[str | tuple[int, ...]],
    cut: Cut | None = None,
    *,
    adds: bool = True,
) -> int:
    """Counts the tokens of texts and token ids; `adds`: with the special ones of texts."""

    def count() -> int:
        numbers = (
            tokenizer.count(each, adds_special_tokens=adds) if isinstance(each, str) else len(each)
            for each in given
        )
        return sum(num if cut is None else min(num, cut.max_tokens) for num in numbers)

    return await tokenised(count, _num_chars(given))


async def _given(
    tokenizer: ModelTokenizer, card: ModelCard, body: GenerationBody
) -> tuple[Sequence[str | tuple[int, ...]], Cut | None]:
    """Returns the prompts, and how they are to be cut."""
    cut = body.cut(card, room=_room_of_prompts(card, body), cuts_left=True)
    if isinstance(body, ChatBody):
        if any(message.parts for message in body.messages):
            cut = None  # it could take the place of an image away
        return [await _rendered(tokenizer, card, body)], cut
    return body.prompt, cut


def _num_chars(given: Sequence[str | tuple[int, ...]]) -> int:
    return sum(len(each) for each in given if isinstance(each, str))


def _room_of_prompts(card: ModelCard, body: GenerationBody) -> int:
    """The tokens that a prompt may have beside the requested output; at least 1."""
    _, given = _given_max_tokens(body)
    output = given if given and given < card.context_length else COMPLETION_TOKENS
    return max(1, card.context_length - output)


async def _rendered(tokenizer: ModelTokenizer, card: ModelCard, body: ChatBody) -> str:
    """Renders a chat. Raises ApiError, TemplateFailed, ModelUnreadable."""
    if tokenizer.template is None:
        message = f"the model {card.name!r} has no chat template: use /v1/completions"
        raise invalid_value("messages", message)
    files = tokenizer.files
    messages: list[Rendered] = []
    for each in body.messages:
        messages.append(each.rendered(files))
        if each.tool_calls:  # whose arguments are parsed
            await asyncio.sleep(0)
    if files.tool_format is not None and files.tool_format.between is None:
        is_harmony = files.reasoning is not None and files.reasoning.is_harmony
        messages = one_call_each(messages, apart=is_harmony)
    tools = [tool.model_dump(exclude_none=True) for tool in body.offered]
    variables = template_variables(files, body.reasoning_effort, body.chat_template_kwargs)
    given = body.documents or ()
    variables["documents"] = [{"text": d} if isinstance(d, str) else d for d in given] or None
    continues = bool(body.continue_final_message)
    try:
        rendered = await tokenizer.template.render(
            messages,
            tools or None,
            variables,
            is_answered=not continues and body.add_generation_prompt is not False,
            continues=continues,
            source=body.chat_template,
        )
    except TemplateRefused as exc:
        raise invalid_value("messages", str(exc)) from None
    check_marks(card, body, rendered)
    return rendered


def _name_of(body: GenerationBody, number: int) -> str:
    """The parameter name of a prompt in errors."""
    if isinstance(body, ChatBody):
        return "messages"
    return f"prompt.{number}" if len(body.prompt) > 1 else "prompt"


def _output_caps(
    settings: GatewaySettings, card: ModelCard, body: GenerationBody, lengths: Sequence[int]
) -> list[int]:
    """Returns the maximum output tokens of one choice, for each prompt. Raises ApiError, also if
    all choices together exceed the maximum of one prompt's choices."""
    caps = [
        _max_tokens(settings, card, body, num_prompt, _name_of(body, number))
        for number, num_prompt in enumerate(lengths)
    ]
    num_output, most = (body.n or 1) * sum(caps), MAX_CHOICES * settings.max_output_tokens
    if num_output > most:
        name, _ = _given_max_tokens(body)
        message = f"{name}: all choices together may have {num_output} tokens, over {most}"
        raise invalid_value(name, message)
    return caps


def _max_tokens(
    settings: GatewaySettings, card: ModelCard, body: GenerationBody, num_prompt: int, param: str
) -> int:
    """The maximum output tokens of a prompt's choice, clipped to the room in the context. Raises
    ApiError if there is no room, or if the body asks for more than the gateway allows."""
    room = card.context_length - num_prompt
    name, given = _given_max_tokens(body)
    if room < 1:
        raise _over_context(card, Over(num_prompt), given or 0, param)
    if given == 0:
        return 1  # the minimum that an engine computes; it is not shown
    if given is None:
        default = settings.default_output_tokens
        return min(room, default if isinstance(body, ChatBody) else COMPLETION_TOKENS)
    if given > room:
        if not settings.clip_max_tokens:
            raise _over_context(card, Over(num_prompt), given, param)
        given = room
    if given > settings.max_output_tokens:
        raise invalid_value(name, f"{name} may be at most {settings.max_output_tokens} here")
    return given


def _over_context(card: ModelCard, prompt: Over, num_output: int, param: str) -> ApiError:
    """An error in OpenAI's words, by which clients recognise it."""
    in_all = Over(prompt.num_tokens + num_output, prompt.is_exact)
    message = (
        f"This model's maximum context length is {card.context_length} tokens. However, you "
        f"requested {in_all} tokens ({prompt} in the {param}, {num_output} in "
        f"the completion). Please reduce the length of the {param} or completion."
    )
    return ContextExceeded(message, param, prompt.num_tokens, card.context_length)


def _given_max_tokens(body: GenerationBody) -> tuple[str, int | None]:
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


# Variables of real templates -> their value for an effort; None: as if it were not given.
OF_EFFORT: Mapping[str, Callable[[Effort], Any]] = {
    "reasoning_effort": lambda effort: effort,  # gpt-oss, Solar, DeepSeek V4
    "thinking_effort": lambda effort: effort,  # Kimi K3
    "enable_thinking": lambda effort: effort != "none",  # Qwen3, GLM, and most others
    "thinking": lambda effort: effort != "none",  # DeepSeek V3.1, Granite
    "thinking_mode": lambda effort: "disabled" if effort == "none" else "enabled",  # MiniMax M3
    "thinking_budget": lambda effort: 0 if effort == "none" else None,  # Seed-OSS
}


def template_variables(
    files: TokenizerFiles, effort: Effort | None, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the operator's variables, those of the effort and the caller's; later ones win.
    Raises ApiError for an effort if the template has no variable for it, except "none" for a model
    that does not reason."""
    variables = dict(files.template_kwargs)
    if effort is not None:
        known = [name for name in files.template_variables if name in OF_EFFORT]
        if not known and (effort != "none" or files.reasoning is not None):
            message = "reasoning_effort: the model's chat template knows no degrees of reasoning"
            raise bad_request(UNSUPPORTED, message, "reasoning_effort")
        values = {name: OF_EFFORT[name](effort) for name in known}
        variables |= {name: value for name, value in values.items() if value is not None}
    return variables | dict(given or {})
