"""The base classes of request bodies, and what becomes of names that they do not have.

Parameters of other servers that would change the response are rejected by name, unless the value is
one without effect (null, or one that is listed). An unknown name is rejected too, as it may be
misspelt, unless it is known to change no answer: at the top of a body, and in objects that say what
is wanted. In past messages, which come back as other servers sent them, unknown names are ignored.
A response header names what is ignored.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ModelWrapValidatorHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from gateway.http.errors import UNKNOWN, similar_name
from gateway.http.errors import UNSUPPORTED as CODE

# OpenAI's limits.
Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]

# Parameter -> values without effect.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "moderation", "web_search_options"), ()),
    "function_call": ("none", "auto"),  # no effect without functions
    "functions": ([],),
    "modalities": (["text"],),
    "suffix": ("",),
    "verbosity": ("medium",),
    # vLLM
    **dict.fromkeys(("early_stopping", "echo", "use_beam_search", "watermarking"), (False,)),
    **dict.fromkeys(("return_mm_kwargs", "return_prompt_text", "return_token_offsets"), (False,)),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs", "vllm_xargs"), ({},)),
    **dict.fromkeys(("ec_transfer_params", "kv_transfer_params", "repetition_detection"), ()),
    **dict.fromkeys(("guided_whitespace_pattern", "logprob_token_ids", "prompt_embeds"), ()),
    **dict.fromkeys(("logits_processors", "mm_payload"), ([],)),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "routed_experts_prompt_start": (0,),
    # SGLang
    **dict.fromkeys(("custom_logit_processor", "custom_params", "ebnf", "lora_path"), ()),
    **dict.fromkeys(("regex", "session_params", "stop_regex"), ()),
    **dict.fromkeys(("no_stop_trim", "return_hidden_states", "return_routed_experts"), (False,)),
    **dict.fromkeys(("return_cached_tokens_details", "return_meta_info"), (False,)),
    **dict.fromkeys(("separate_reasoning", "stream_reasoning"), (True,)),
    # llama.cpp
    **dict.fromkeys(("dry_multiplier", "dynatemp_range", "mirostat", "xtc_probability"), (0,)),
    **dict.fromkeys(("min_keep", "n_discard", "n_indent", "n_keep", "n_probs"), (0,)),
    **dict.fromkeys(("repeat_penalty", "tfs_z", "typ_p", "typical_p"), (1,)),
    **dict.fromkeys(("n_predict", "reasoning_budget"), (-1,)),
    **dict.fromkeys(("grammar_lazy", "penalize_nl", "post_sampling_probs"), (False,)),
    **dict.fromkeys(("reasoning_in_content", "return_progress", "return_tokens"), (False,)),
    **dict.fromkeys(("image_data", "lora", "response_fields", "samplers"), ([],)),
    "grammar": ("",),
    "json_schema": ({},),
    "parse_tool_calls": (True,),
    "reasoning_format": ("auto", "deepseek"),
    "thinking_forced_open": (False,),
    "top_n_sigma": (-1, 0),
}
# Names at the top of a body that clients are known to send, and that change no answer: for tracing,
# caching and routing elsewhere, hints to a scheduler, and degrees of what is refused above.
IGNORED = frozenset(
    {
        *("prediction", "prompt_cache_options", "store"),  # OpenAI
        *("client_metadata", "client_request_id", "run_id", "span_id", "turn_id"),  # Codex, others
        *("cache_salt", "priority", "request_id", "session_id"),  # vLLM, Cohere
        *("data_parallel_rank", "guided_decoding_backend", "stream_interval"),  # vLLM
        *("extra_key", "rid"),  # SGLang
        *("cache_control", "provider", "usage"),  # OpenRouter
        *("extra_headers", "extra_query", "timeout"),  # options of OpenAI's client
        *("litellm_call_id", "litellm_metadata", "litellm_session_id", "litellm_trace_id"),
        *("cache_prompt", "id_slot", "timings_per_token"),  # llama.cpp
        *("dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("dynatemp_exponent", "mirostat_eta", "mirostat_tau", "repeat_last_n", "xtc_threshold"),
        *("keep_alive", "ttl"),  # Ollama, LM Studio
        *("chat_id", "conversation_id", "tags", "thread_id", "trace_id"),
    }
)
# The same in objects that say what is wanted: descriptions that no prompt shows.
DESCRIPTIONS = frozenset(
    {
        *("allowed_callers", "cache_control", "defer_loading", "eager_input_streaming"),
        *("annotations", "description", "display_name", "icons", "id", "index", "metadata", "name"),
        *("examples", "input_examples", "output_schema", "outputSchema", "return", "returns"),
        *("$schema", "tags", "title", "version"),
    }
)
# Parts of a message that the model would not see.
OF_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "partial": (False,),  # of a last message that the model is to continue
    "prefix": (False,),
    "refusal": (),
}
ROLES = frozenset({"function"})
PARTS = frozenset({"input_audio", "file", "refusal", "video_url", "audio_url"})
TEXT_PART = frozenset({"type", "text"})
_MAX_NAMES, _MAX_NAME = 20, 100  # of ignored names in the header: how many, and characters of each
_UNSAFE = re.compile(r"[^A-Za-z0-9_.$@/-]")  # in a header


def refusal(message: str, param: str | None = None, code: str = "refused") -> PydanticCustomError:
    """An error for validators to raise. `param` is a path relative to the validated value."""
    param = param and param[:_MAX_NAME]
    return PydanticCustomError(code, "{message}", {"message": message, "param": param})


def unsupported(message: str, param: str | None = None) -> PydanticCustomError:
    return refusal(message, param, CODE)


def _end_early(node: Any, owner: str) -> None:
    """Makes each list and object of a core schema end at its first error, and be counted before its
    members are read. Raises TypeError for one without a bound."""
    if isinstance(node, list | tuple):
        for each in node:
            _end_early(each, owner)
    if not isinstance(node, dict) or (node.get("fail_fast") is True and "max_length" in node):
        return  # as a list that another model has made so
    kind = node.get("type")  # of a schema; in a dict of fields, the field of this name
    for name, each in node.items():
        if not isinstance(kind, str) or name not in ("default", "metadata"):
            _end_early(each, owner)
    if kind == "tuple":  # no JSON is one: a validator has made it, and counted
        node["fail_fast"] = True
    if kind not in ("dict", "frozenset", "generator", "list", "set"):
        return
    if "max_length" not in node:
        raise TypeError(f"{owner} has a {kind} without max_length")
    inner = {**node, "fail_fast": True}
    expected = dict if kind == "dict" else list
    counted = functools.partial(_counted, kind=expected, most=node["max_length"])
    node.clear()
    node |= core_schema.no_info_before_validator_function(counted, inner)


def _counted(value: Any, kind: type[Sized], most: int) -> Any:
    if isinstance(value, kind) and len(value) > most:
        raise refusal(f"at most {most} members, not {len(value)}")
    return value


class StrictModel(BaseModel):
    """The base class of bodies and of objects in them: rejects wrong types and coercions.

    Unknown names are ignored; where a class has `extra="forbid"`, only its `harmless` ones. A list
    or an object ends at its first error, and must have a `max_length`: a class without one cannot
    be made.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, hide_input_in_errors=True)

    unasked: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # parameter -> values without effect
    harmless: ClassVar[frozenset[str]] = IGNORED
    # Fields of which validators take texts out of objects -> the known names of those objects.
    names_of_objects: ClassVar[Mapping[str, frozenset[str]]] = {}

    # Names given here, below them dots. pydantic's private attributes take 5 µs an object.
    __slots__ = ("_ignored",)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _end_early(handler.resolve_ref_schema(schema), cls.__name__)
        return schema

    @model_validator(mode="wrap")
    @classmethod
    def _with_known_names(cls, fields: Any, validated: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(fields, dict):
            return validated(fields)
        known = _known_names(cls)
        kept = {name: fields[name] for name in known if name in fields}
        ignored = []
        if len(kept) < len(fields):
            for name, value in fields.items():
                if name in cls.unasked and name not in known:
                    _check_asks_for_nothing(name, value, cls.unasked[name])
            ignored = [*itertools.islice(cls._unknown(fields), len(IGNORED))]
        model = validated(kept)
        if cls.names_of_objects:
            ignored += _first(cls._unknown_in_objects(kept))
        object.__setattr__(model, "_ignored", ignored)  # the model is frozen
        return model

    @classmethod
    def _unknown(cls, fields: Mapping[str, Any]) -> Iterator[str]:
        """Yields names that are ignored. Raises PydanticCustomError at one that is refused."""
        known = _known_names(cls)
        for name in fields:
            if name in known or name in cls.unasked:
                continue
            if cls.model_config["extra"] != "forbid":
                yield name
            elif fields[name] is None and issubclass(cls, Wanted):
                continue
            elif name not in cls.harmless:
                similar = similar_name(name, known)
                hint = f"; did you mean {similar}?" if similar else ""
                raise refusal(f"unknown parameter{hint}", name, UNKNOWN)
            elif fields[name]:  # false, 0 and null ask for nothing
                yield name

    @classmethod
    def _unknown_in_objects(cls, fields: Mapping[str, Any]) -> Iterator[str]:
        for name, names in cls.names_of_objects.items():
            given = fields.get(name)
            for each in given if isinstance(given, list) else ():
                others = each if isinstance(each, dict) else ()
                yield from (f"{name}.{it[:_MAX_NAME]}" for it in others if it not in names)


@functools.cache
def _known_names(model: type[StrictModel]) -> Mapping[str, None]:
    return dict.fromkeys(field.alias or name for name, field in model.model_fields.items())


class Wanted(StrictModel):
    """An object that says what is wanted, unlike one of a past message."""

    model_config = ConfigDict(extra="forbid")
    harmless = DESCRIPTIONS


class OwnModel(StrictModel):
    """A body of this server's own, or an object in one: no other server's clients send it."""

    model_config = ConfigDict(extra="forbid")


def _first(names: Iterable[str]) -> list[str]:
    """The first names, cut, each once: one more than a header shows."""
    found = dict[str, None]()
    for name in names:
        found[name[:_MAX_NAME]] = None
        if len(found) > _MAX_NAMES:
            break
    return [*found]


def _check_asks_for_nothing(name: str, value: Any, unasked: tuple[Any, ...]) -> None:
    """Raises PydanticCustomError unless the value has no effect."""
    if value is not None and value not in unasked:
        possible = " or ".join(json.dumps(taken) for taken in unasked)
        message = "not supported with this value; leave it out"
        raise unsupported(message + (f", or send {possible}" if possible else ""), name)


class CallFields(StrictModel):
    """The fields of every call. None always means the default."""

    model_config = ConfigDict(extra="forbid")

    # Validated, but without effect.
    ignored: ClassVar[tuple[str, ...]] = (
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    )

    model: str = Field(min_length=1, max_length=256, description="a name from `GET /v1/models`")
    service_tier: Literal["auto", "default", "priority", "flex"] | None = Field(
        None, description="`priority` is the lane `interactive`, `flex` is `batch`"
    )
    on_disconnect: Literal["cancel", "continue"] | None = Field(
        None, description="the job; default: `cancel`, of calls with `Idempotency-Key` `continue`"
    )
    user: str | None = Field(None, max_length=512, description="checked, ignored")
    safety_identifier: str | None = Field(None, max_length=512, description="checked, ignored")
    prompt_cache_key: str | None = Field(None, max_length=512, description="checked, ignored")
    prompt_cache_retention: str | None = Field(None, max_length=64, description="checked, ignored")
    metadata: dict[str, str] | None = Field(None, max_length=16, description="checked, ignored")

    def left_out(self) -> list[str]:
        """The paths of its parts that have no effect."""
        return []


def ignored_header(body: CallFields) -> dict[str, str]:
    """The header `x-ignored-parameters`, with the body's parameters that have no effect; {} if
    there are none. Those in objects are named by their path without positions."""
    found = [name for name in body.ignored if getattr(body, name) is not None]
    names = _first(itertools.chain(found, body.left_out(), _ignored_in(body)))
    shown = [_UNSAFE.sub("?", name) for name in names[:_MAX_NAMES]]
    if len(names) > _MAX_NAMES:
        shown.append("...")
    return {"x-ignored-parameters": ", ".join(shown)} if shown else {}


def _ignored_in(model: StrictModel) -> Iterator[str]:
    yield from getattr(model, "_ignored", ())
    for name, value in model:
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, StrictModel):
                field = type(model).model_fields[name]
                yield from (f"{field.alias or name}.{path}" for path in _ignored_in(each))
