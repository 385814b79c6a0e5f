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

from contract.jobs import MAX_PRIORITY
from gateway.http.errors import UNKNOWN, similar_name
from gateway.http.errors import UNSUPPORTED as CODE

# OpenAI's limits.
Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


def none_of(names: str, *values: Any) -> dict[str, tuple[Any, ...]]:
    """Parameters -> their values that ask for nothing, beside null."""
    return dict.fromkeys(names.split(), values)


def _names(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


# Parameters of OpenAI, vLLM, SGLang and llama.cpp that are not here.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **none_of("audio custom_logit_processor custom_params ebnf ec_transfer_params"),
    **none_of("guided_whitespace_pattern kv_transfer_params logprob_token_ids lora_path"),
    **none_of("max_dynamic_patch min_dynamic_patch moderation prompt_embeds regex"),
    **none_of("repetition_detection session_params stop_regex thinking_token_budget"),
    **none_of("web_search_options"),
    **none_of("grammar suffix", ""),
    **none_of("chat_format", "Content-only"),
    **none_of("reasoning_format", "auto", "deepseek"),
    **none_of("verbosity", "medium"),
    **none_of("function_call", "none", "auto"),
    **none_of("mm_payload", "tensors"),
    **none_of("adaptive_target n_predict reasoning_budget", -1),
    **none_of("top_n_sigma", -1, 0),
    **none_of("dry_multiplier dynatemp_range min_keep mirostat n_discard n_indent n_keep", 0),
    **none_of("n_probs routed_experts_prompt_start xtc_probability", 0),
    **none_of("t_max_predict_ms", 0, -1),
    **none_of("length_penalty n_cmpl repeat_penalty tfs_z typ_p typical_p", 1),
    **none_of("backend_sampling early_stopping echo grammar_lazy no_stop_trim", False),
    **none_of("penalize_nl post_sampling_probs reasoning_in_content", False),
    **none_of("return_cached_tokens_details return_hidden_states return_meta_info", False),
    **none_of("return_mm_kwargs return_progress return_prompt_text", False),
    **none_of("return_prompt_token_ids return_routed_experts return_token_offsets", False),
    **none_of("return_tokens thinking_forced_open use_audio_in_video use_beam_search", False),
    **none_of("watermarking", False),
    **none_of("include_reasoning parse_tool_calls separate_reasoning stream_reasoning", True),
    **none_of("modalities", ["text"]),
    **none_of("functions image_data logits_processors lora preserved_tokens", []),
    **none_of("response_fields samplers", []),
    **none_of("json_schema media_io_kwargs mm_processor_kwargs vllm_xargs", {}),
}
# Names at the top of a body that clients are known to send, and that change no answer: for tracing,
# caching and routing elsewhere, hints to a scheduler, and degrees of what is refused above.
IGNORED = _names(
    "adaptive_decay bootstrap_host bootstrap_port bootstrap_room cache_control cache_prompt",
    "cache_salt chat_id client_metadata client_request_id conversation_id data_parallel_rank",
    "dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers dynatemp_exponent",
    "extra_headers extra_key extra_query guided_decoding_backend id_slot keep_alive",
    "litellm_call_id litellm_metadata litellm_session_id litellm_trace_id mirostat_eta",
    "mirostat_tau n_cache_reuse prediction prompt_cache_options provider repeat_last_n",
    "request_id rid run_id session_id span_id store stream_interval tags thread_id timeout",
    "timings_per_token trace_id ttl turn_id usage xtc_threshold",
)
# The same in objects that say what is wanted: descriptions that no prompt shows.
DESCRIPTIONS = _names(
    "$schema allowed_callers annotations cache_control defer_loading description display_name",
    "eager_input_streaming examples icons id index input_examples metadata name output_schema",
    "outputSchema return returns tags title version",
)
# Parts of a message that the model would not see, and marks of a last one that it is to continue.
OF_MESSAGES = none_of("audio function_call refusal") | none_of("partial prefix", False)
ROLES = frozenset({"function"})
SESSION = "session"  # in metadata
MAX_SESSION = 512  # characters
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
        for name in sorted(cls.unasked.keys() & fields.keys()):
            if name not in known:
                _check_asks_for_nothing(name, fields[name], cls.unasked[name])
            elif fields[name] in cls.unasked[name]:
                del kept[name]
        if len(kept) < len(fields):
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
    priority: int | None = Field(
        None, ge=-MAX_PRIORITY - 1, le=MAX_PRIORITY, description="lower is earlier; default: 0"
    )
    user: str | None = Field(None, max_length=512, description="checked, ignored")
    safety_identifier: str | None = Field(None, max_length=512, description="checked, ignored")
    prompt_cache_key: str | None = Field(
        None, max_length=MAX_SESSION, description="a session: its calls prefer one worker"
    )
    prompt_cache_retention: str | None = Field(None, max_length=64, description="checked, ignored")
    metadata: dict[str, str] | None = Field(
        None, max_length=16, description="`session` as `prompt_cache_key`; others are ignored"
    )

    def left_out(self) -> list[str]:
        """The paths of its parts that have no effect."""
        return []


def ignored_header(body: CallFields) -> dict[str, str]:
    """The header `x-ignored-parameters`, with the body's parameters that have no effect; {} if
    there are none. Those in objects are named by their path without positions."""
    found = [name for name in body.ignored if getattr(body, name) is not None]
    chained = itertools.chain(found, body.left_out(), _ignored_in(body))
    names = [n for n in _first(chained) if n != "metadata" or set(body.metadata or ()) != {SESSION}]
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
