"""Definitions of flows: models that consist of other models.

A gateway reads them from `models.yaml` and publishes them in model cards.
"""

from typing import Annotated, Literal

import msgspec

from contract.endpoints import Endpoint

_Name = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^\S+\Z")]
_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_Positive = Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]


class _Strict(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Unknown fields are errors, so that a misspelt one is not ignored."""


class Target(_Strict, frozen=True, kw_only=True):
    """A model that a route may choose; calls are shared in proportion to the weights."""

    model: _Name
    weight: _Positive = 1.0


class Condition(_Strict, frozen=True, kw_only=True):
    """Is true if all that it names is true."""

    min_prompt_tokens: int = 0  # as the route's first target counts them
    max_prompt_tokens: int | None = None
    languages: tuple[str, ...] = ()  # ISO 639-1 codes
    tenants: tuple[str, ...] = ()
    # A regular expression without look-around and back-references (it takes time linear in the
    # text), found in the last prompt or user's message.
    pattern: str = ""
    metadata: dict[str, str] = {}
    labels: tuple[str, ...] = ()  # of the route's classifier


class Rule(_Strict, frozen=True, kw_only=True):
    """Sends calls for which `when` is true to one of `to`."""

    when: Condition
    to: Annotated[tuple[Target, ...], msgspec.Meta(min_length=1)]


class Route(_Strict, frozen=True, kw_only=True, tag_field="kind", tag="route"):
    """Sends a call to one model: of the first rule that matches, or of `otherwise`."""

    rules: tuple[Rule, ...] = ()
    otherwise: Annotated[tuple[Target, ...], msgspec.Meta(min_length=1)]
    classifier: str = ""  # a model of /v1/classify; its label is asked for where a rule has labels

    @property
    def targets(self) -> tuple[Target, ...]:
        """The targets of all rules, and `otherwise`."""
        return (*(to for rule in self.rules for to in rule.to), *self.otherwise)


class Confidence(_Strict, frozen=True, kw_only=True):
    """How sure a member of a cascade is of its answer, from 0 to 1.

    `mean_logprob` is exp of the mean log probability of its tokens, `quantile_logprob` exp of that
    quantile of them. `field` is the number in that field of a JSON answer. `scorer` is the score
    that the model `scorer`, of /v1/score, gives to the prompt and the answer.
    """

    by: Literal["mean_logprob", "quantile_logprob", "field", "scorer"] = "mean_logprob"
    quantile: _Share = 0.1
    field: str = ""
    scorer: str = ""


class Member(_Strict, frozen=True, kw_only=True):
    """A model of a cascade. Its answer is the cascade's if its confidence reaches `threshold`."""

    model: _Name
    threshold: _Share | None = None  # None: of the last member, whose answer always stands


class Cascade(_Strict, frozen=True, kw_only=True, tag_field="kind", tag="cascade"):
    """Asks its members in order, until one is sure of its answer."""

    members: Annotated[tuple[Member, ...], msgspec.Meta(min_length=2)]
    confidence: Confidence = Confidence()

    @property
    def num_scored(self) -> int:
        """Members whose answers a scorer scores."""
        return len(self.members) - 1 if self.confidence.scorer else 0


class Ensemble(_Strict, frozen=True, kw_only=True, tag_field="kind", tag="ensemble"):
    """Asks all its members at once.

    `vote` takes the most frequent answer (of equals, the earliest member's), `best-by-score` the
    one to which the model `scorer` gives the highest score, `mean` the mean of embeddings or
    scores.
    """

    members: Annotated[tuple[_Name, ...], msgspec.Meta(min_length=2, max_length=16)]
    combine: Literal["vote", "best-by-score", "mean"]
    scorer: str = ""

    @property
    def num_scored(self) -> int:
        """Members whose answers a scorer scores."""
        return len(self.members) if self.scorer else 0


MAX_CALLS = 256  # of models, for one call of a flow
INPUT = "input"  # the name of the caller's body in templates


class Step(_Strict, frozen=True, kw_only=True):
    """One call of a pipeline. Strings in `body` are templates over `input`, the caller's body, and
    over the answers of earlier steps by name; a string that is one `{{ expression }}` becomes its
    value, of any type."""

    name: Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[a-z][a-z0-9_]*\Z")]
    model: _Name
    endpoint: Endpoint
    body: dict[str, object]


class Pipeline(_Strict, frozen=True, kw_only=True, tag_field="kind", tag="pipeline"):
    """Runs its steps in order; the last one's answer is the flow's.

    `staged` holds each step's calls until they fill the step's best batch, `flat` sends them at
    once.
    """

    steps: Annotated[tuple[Step, ...], msgspec.Meta(min_length=1, max_length=16)]
    batching: Literal["staged", "flat"] = "flat"


Definition = Route | Cascade | Ensemble | Pipeline


def deciding_members(definition: Definition) -> list[str]:
    """The models whose output may be the flow's."""
    match definition:
        case Route():
            return [to.model for to in definition.targets]
        case Cascade():
            return [member.model for member in definition.members]
        case Ensemble():
            return list(definition.members)
        case Pipeline():
            return [definition.steps[-1].model]


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """A checked definition, and the endpoints through which it can be called."""

    definition: Definition
    endpoints: tuple[Endpoint, ...]


class FlowCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of a flow's job for the process that runs it."""

    flow: Flow  # as it was when the job was accepted
    body: bytes  # of the call, checked: JSON
    retention_s: float  # of its calls' outputs, after the deadline
    needs_worker: bool = False  # no call waits for a worker if others can answer
    metadata: dict[str, str] = {}  # of the job
    tokens_per_min: int = 0  # the tenant's limit, to whose meter the calls add what they use
    priority: int = 0  # of the job, and so of its calls
