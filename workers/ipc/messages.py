"""The messages between the supervisor and the engine process; `channel` carries them."""

from typing import Any, Literal

import msgspec

from contract.events import TokenLogprob
from contract.jobs import FinishReason, MarkKind, Pooling, SamplingParams
from contract.model_cards import (
    Capabilities,
    GenerationDefaults,
    PoolingCard,
    TokenizerFiles,
)


class Request(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """A job's choices, each continuing after its logged output. The supervisor sends it."""

    job_id: str
    epoch: int
    tenant: str
    lane: str
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    outputs: tuple[tuple[int, ...], ...]  # logged output ids of each choice, `n` for each prompt
    finished: tuple[bool, ...]  # choices that have already ended
    # The job ends then, wherever it is: seconds from now in a message, because processes share no
    # clock, and on the engine's clock in the engine.
    deadline_s: float | None = None
    weight: float = 1.0  # of its tenant: the share of places and tokens in its lane
    pooling: Pooling | None = None  # of a prefill-only job
    images: tuple[bytes, ...] = ()  # files, in the order of their marks in the prompt
    num_image_tokens: int = 0  # the most that they may add to the prompt


class TokenOut(msgspec.Struct, frozen=True, array_like=True, tag="token", gc=False):
    """One new output token of one choice, at `position` among its output tokens. The final token is
    included; it has a `finish_reason`."""

    job_id: str
    epoch: int
    choice: int
    position: int
    token_id: int
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None


StrategyName = Literal["continuous", "static", "dynamic"]

DEFAULT_PLACES = 256
STATIC_WAIT_S = 1.0
DYNAMIC_WINDOW_S = 0.02


class StrategyOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A batching strategy and its parameters; each strategy reads those that it has."""

    name: StrategyName = "continuous"
    batch_size: int = 8  # static, dynamic: sequences of a full batch
    window_s: float | None = None  # static, dynamic: the longest wait for a full batch
    # static: the next batch may start when at most this share of the last still runs
    drain_share: float = 0.0
    bucket_edges: tuple[int, ...] = ()  # dynamic: prompt lengths that separate buckets, ascending
    padded: bool = False  # static, dynamic: compute batches as rectangles


class LaneOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lane as the engine sees it. None: the engine's own default."""

    name: str
    priority: int | None = None  # the smallest goes first
    itl_target_s: float | None = None  # between two tokens of a stream
    min_share: float | None = None  # of the computed tokens, while the lane has work
    # An unserved tenant rises by one priority for this many tokens of others.
    ageing_tokens: int | None = None
    max_slowdown: float | None = None  # of the steps of lanes without this limit, by its work
    strategy: StrategyOptions | None = None  # None: the default strategy


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine process is started: the one JSON argument of its command line.

    None leaves the choice to the loader, which knows the device and the model.
    """

    model_path: str
    revision: str | None = None  # of a model of the Hub: a branch, tag or commit
    dtype: str = "auto"  # auto, float32, bfloat16 or float16
    quantization: str = "none"  # none or int8, on a CPU: of the linear layers' weights
    device: str = "auto"  # auto, cpu or cuda
    kv_memory_bytes: int | None = None
    memory_share: float | None = None  # of its device, for weights and KV; None: what is free
    block_size: int | None = None  # tokens of KV in a block
    max_model_len: int | None = None  # prompt + output, in tokens; at most the model's own
    max_num_seqs: int | None = None  # sequences at a time
    max_num_batched_tokens: int | None = None  # the token budget of a step
    kv_high_water: float = 0.8  # share of the KV blocks up to which new sequences are admitted
    prefill_share: float | None = None  # of the budget, for prompts while there are streams
    prefix_caching: bool = True  # KV of equal beginnings is computed once for each tenant
    speculation: bool = False  # compute drafted tokens where that is expected to pay
    max_output_tokens: int | None = None  # of one choice, whatever its job asks for
    strategy: StrategyOptions = StrategyOptions()
    lanes: tuple[LaneOptions, ...] = ()
    batching_version: str = ""  # version of batching.yaml
    num_threads: int | None = None
    attention: str = "auto"  # auto or torch
    fused: bool = True  # exchange modules for faster ones that prove equal
    generation_config: str = "auto"  # the model's sampling settings hold; none: they do not
    tool_call_parser: str = "auto"  # a name in workers.output.formats, or none
    reasoning_parser: str = "auto"  # a name in workers.output.formats, or none
    chat_template_kwargs: dict[str, Any] = {}  # variables of the chat template; a call's go before
    engine_args: dict[str, str] = {}  # vLLM's own, by name
    nodes: int = 1  # machines that share vLLM's ranks
    node_rank: int = 0
    master: str = ""  # HOST:PORT where node 0 waits for the others

    @property
    def num_places(self) -> int:
        """`max_num_seqs` of batchway's own engine; vLLM has a default of its own."""
        return self.max_num_seqs or DEFAULT_PLACES


# --- supervisor to engine process -------------------------------------------------------------


class StopJob(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Drop a job: cancelled, fenced or released. No message comes back."""

    job_id: str
    epoch: int


class StopChoice(msgspec.Struct, frozen=True, array_like=True, tag="stop_choice"):
    """End one choice, whose text contains a stop string, or say that it has called a tool."""

    job_id: str
    epoch: int
    choice: int
    reason: FinishReason = FinishReason.STOP


class Reconfigure(msgspec.Struct, frozen=True, array_like=True, tag="reconfigure"):
    """Apply these limits, lanes and strategies from the next step; no token is lost.

    Options for loading the model (memory, lengths, types) have no effect.
    """

    options: EngineOptions


class Reprioritise(msgspec.Struct, frozen=True, array_like=True, tag="reprioritise"):
    """Move a job to another lane and deadline, running or waiting. No message comes back."""

    job_id: str
    epoch: int
    lane: str
    deadline_s: float | None = None  # seconds from now


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """End the engine process. Closing the socket has the same effect."""


ToEngine = Request | StopJob | StopChoice | Reprioritise | Reconfigure | Shutdown

# --- engine process to supervisor -------------------------------------------------------------


class Loading(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """Progress of loading, one line for the operator."""

    text: str


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="load_failed"):
    """The model cannot be served; the process ends after this. `message` is one sentence."""

    message: str


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The engine can take work."""

    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerFiles
    num_blocks: int
    block_size: int
    max_num_seqs: int | None = None  # whatever Reconfigure says; None: that of the options
    capabilities: Capabilities = Capabilities()
    generation: GenerationDefaults = GenerationDefaults()
    pooling: PoolingCard | None = None  # of a prefill-only model
    tokens_per_s: float = 0.0  # of a full step of a prefill-only model; 0: not measured
    num_step_tokens: int = 0  # the token budget of a step; 0: unknown
    device: str = ""  # its name
    gpu_uuids: tuple[str, ...] = ()  # of the GPUs that compute, as nvidia-smi names them


class RunningJobs(msgspec.Struct, frozen=True, array_like=True, tag="running"):
    """The jobs of the next step, sent if they are others than those of the last one. If the
    process dies, the supervisor knows which jobs it was computing."""

    job_ids: tuple[str, ...]


class PromptLogprobsOut(msgspec.Struct, frozen=True, array_like=True, tag="prompt_logprobs"):
    """Log probabilities of a prompt's tokens from position `start` on, in order, for jobs whose
    parameters ask. All are sent before the prompt's first output token; after a preemption or a
    resume they are sent again from an earlier `start`.
    """

    job_id: str
    epoch: int
    start: int
    logprobs: tuple[TokenLogprob, ...]
    prompt: int = 0  # which of the job's prompts


class VectorOut(msgspec.Struct, frozen=True, array_like=True, tag="vector"):
    """The vector of one prompt of a prefill-only job; the prompt has ended."""

    job_id: str
    epoch: int
    choice: int  # which of the job's prompts
    vector: bytes  # float32, little-endian


class ChoiceEnded(msgspec.Struct, frozen=True, array_like=True, tag="choice_ended"):
    """A choice that ended without an ending token: its output was already complete."""

    job_id: str
    epoch: int
    choice: int
    finish_reason: FinishReason


class JobFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """A job that this engine cannot run; an error of that job alone."""

    job_id: str
    epoch: int
    code: str
    message: str


class Marked(msgspec.Struct, frozen=True, array_like=True, tag="marked"):
    """What a step did with a job beside its output; of a loss, the tokens that it had computed."""

    job_id: str
    epoch: int
    kind: MarkKind
    num_tokens: int


class PrefixFound(msgspec.Struct, frozen=True, array_like=True, tag="prefix_found"):
    """How many tokens of a prompt were in the cache when it began, sent before its first output;
    not sent for none, nor when the prompt begins again."""

    job_id: str
    epoch: int
    choice: int
    num_tokens: int


class EngineLoad(msgspec.Struct, array_like=True, tag="load"):
    """The engine's state after a step, from which the supervisor sizes its next claim."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_step_tokens: int = 0  # without padding
    step_s: float = 0.0
    num_padding_tokens: int = 0  # pad tokens beside the step's
    num_step_seqs: int = 0  # batch size
    num_decode_tokens: int = 0  # one for each stream, and drafted ones; the others are prefill
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0  # part of the step's, lost by an earlier preemption
    num_prefix_queries: int = 0  # tokens of admitted sequences
    num_prefix_hits: int = 0  # part of them found in the cache
    ended_s: float = 0.0  # engine's clock at the end of the step; only differences have a meaning
    waiting_lanes: tuple[str, ...] = ()  # names of lanes with waiting sequences
    num_forced_tokens: int = 0  # output that grammars forced, without a sample
    num_drafted_tokens: int = 0  # part of the step's, computed before they were known
    num_accepted_tokens: int = 0  # part of them that were right
    model_s: float = 0.0  # the model's part of `step_s`
    # `model_s` as predicted before the step. 0: there was no prediction yet; None: there never is.
    predicted_s: float | None = None
    num_cached_blocks: int | None = None  # part of the free ones; None: unknown
    num_retained_blocks: int = 0  # part of the cached ones, for sessions whose tools run
    gives_way: bool = False  # lanes with `max_slowdown` had little of the step, beside others


FromEngine = (
    Loading
    | LoadFailed
    | EngineReady
    | RunningJobs
    | PromptLogprobsOut
    | TokenOut
    | VectorOut
    | ChoiceEnded
    | JobFailed
    | Marked
    | PrefixFound
    | EngineLoad
)
