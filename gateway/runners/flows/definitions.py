"""Reads `models.yaml`: models that consist of others. What needs their cards is checked in
flow_types.py."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from contract.flows import INPUT, MAX_CALLS, Cascade, Definition, Ensemble, Pipeline, Route
from contract.yaml_files import YamlFault, load_file
from gateway.child import Refused
from gateway.models.step_bodies import check_templates
from gateway.prepare.conditions import check_languages, check_pattern


class FlowError(Exception):
    """A flow's definition is wrong. The message names the file, the place and the fault."""


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flow in the file."""

    name: Annotated[str, msgspec.Meta(max_length=256, pattern=r"^\S+\Z")]
    route: Route | None = None
    cascade: Cascade | None = None
    ensemble: Ensemble | None = None
    pipeline: Pipeline | None = None

    def definitions(self) -> dict[str, Definition]:
        """The definitions by kind."""
        kinds: dict[str, Definition | None] = {
            "route": self.route,
            "cascade": self.cascade,
            "ensemble": self.ensemble,
            "pipeline": self.pipeline,
        }
        return {kind: found for kind, found in kinds.items() if found is not None}


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    models: tuple[_Entry, ...]


def load_flows(path: Path) -> dict[str, Definition]:
    """The definitions by name, in the file's order, checked as far as that needs no cards. Raises
    FlowError."""
    try:
        entries = _read(path).models
        found: dict[str, Definition] = {}
        for index, entry in enumerate(entries):
            place = f"models[{index}]"
            if entry.name in found:
                raise FlowError(f"{place}.name: {entry.name!r} is the name of an earlier flow")
            kinds = entry.definitions()
            if len(kinds) != 1:
                raise FlowError(
                    f"{place}: needs exactly one of route, cascade, ensemble and pipeline"
                )
            for kind, definition in kinds.items():
                _check(definition, f"{place}.{kind}")
                found[entry.name] = definition
        _check_cycles(found)
    except FlowError as fault:
        raise FlowError(f"{path}: {fault}") from fault
    return found


def members(definition: Definition) -> Iterator[tuple[str, str]]:
    """Yields the models that a flow may call, each with its place in the definition."""
    match definition:
        case Route():
            for i, rule in enumerate(definition.rules):
                yield from ((f"rules[{i}].to[{j}].model", t.model) for j, t in enumerate(rule.to))
            for i, target in enumerate(definition.otherwise):
                yield f"otherwise[{i}].model", target.model
            if definition.classifier:
                yield "classifier", definition.classifier
        case Cascade():
            yield from (
                (f"members[{i}].model", member.model) for i, member in enumerate(definition.members)
            )
            if definition.confidence.scorer:
                yield "confidence.scorer", definition.confidence.scorer
        case Ensemble():
            yield from ((f"members[{i}]", model) for i, model in enumerate(definition.members))
            if definition.scorer:
                yield "scorer", definition.scorer
        case Pipeline():
            yield from (
                (f"steps[{i}].model", step.model) for i, step in enumerate(definition.steps)
            )


def _read(path: Path) -> _File:
    try:
        raw = load_file(path)
        # Through JSON, which turns dates into text, and keys into strings.
        return msgspec.json.decode(msgspec.json.encode(raw), type=_File)
    except (OSError, UnicodeDecodeError) as exc:
        raise FlowError(f"cannot be read: {exc}") from exc
    except YamlFault as exc:
        raise FlowError(f"line {exc.line}: {exc}") from exc
    except msgspec.ValidationError as exc:
        fault, _, place = str(exc).partition(" - at `$")
        raise FlowError(f"{place.strip('`.') or 'the file'}: {fault}") from exc
    except TypeError as exc:
        raise FlowError(f"holds what JSON cannot: {exc}") from exc


def _check(definition: Definition, place: str) -> None:
    match definition:
        case Route():
            _check_route(definition, place)
        case Cascade():
            _check_cascade(definition, place)
        case Ensemble():
            needs_scorer = definition.combine == "best-by-score"
            if needs_scorer != bool(definition.scorer):
                raise FlowError(f"{place}.scorer: best-by-score needs one, and nothing else does")
        case Pipeline():
            _check_pipeline(definition, place)


def _check_route(route: Route, place: str) -> None:
    for index, rule in enumerate(route.rules):
        at, when = f"{place}.rules[{index}].when", rule.when
        if when.max_prompt_tokens is not None and when.max_prompt_tokens < when.min_prompt_tokens:
            raise FlowError(f"{at}.max_prompt_tokens: is less than min_prompt_tokens")
        if when.labels and not route.classifier:
            raise FlowError(f"{at}.labels: the route has no classifier")
        try:
            if when.pattern:
                check_pattern(when.pattern)
        except ValueError as exc:
            raise FlowError(f"{at}.pattern: {exc}") from exc
        try:
            if when.languages:
                check_languages(when.languages)
        except ValueError as exc:
            raise FlowError(f"{at}.languages: {exc}") from exc
    if route.classifier and not any(rule.when.labels for rule in route.rules):
        raise FlowError(f"{place}.classifier: no rule has labels")


def _check_cascade(cascade: Cascade, place: str) -> None:
    last = len(cascade.members) - 1
    for index, member in enumerate(cascade.members):
        at = f"{place}.members[{index}].threshold"
        if index < last and member.threshold is None:
            raise FlowError(f"{at}: is missing; `batchway cascade fit` finds one")
        if index == last and member.threshold is not None:
            raise FlowError(f"{at}: the last member's answer always stands")
    for kind, value in (("scorer", cascade.confidence.scorer), ("field", cascade.confidence.field)):
        if (cascade.confidence.by == kind) != bool(value):
            raise FlowError(f"{place}.confidence.{kind}: goes with `by: {kind}`, and only with it")


def _check_pipeline(pipeline: Pipeline, place: str) -> None:
    names = [INPUT]
    for index, step in enumerate(pipeline.steps):
        at = f"{place}.steps[{index}]"
        if step.name in names:
            raise FlowError(f"{at}.name: {step.name!r} is already the name of a value")
        for key in ("model", "stream"):
            if key in step.body:
                raise FlowError(f"{at}.body.{key}: cannot be set in a step")
        try:
            check_templates(step, names)
        except Refused as exc:
            raise FlowError(f"{at}.{exc}") from exc
        names.append(step.name)


def _check_cycles(flows: Mapping[str, Definition]) -> None:
    """Refuses flows that call themselves, and those with too many calls."""
    num_calls: dict[str, int] = {}

    def visit(name: str, path: tuple[str, ...]) -> int:
        if name not in flows:
            return 1
        if name in path:
            cycle = " -> ".join((*path[path.index(name) :], name))
            raise FlowError(f"{_place(name)}: calls itself: {cycle}")
        if name not in num_calls:
            called = [model for _, model in members(flows[name])]
            match flows[name]:  # the last of them is the scorer
                case (Cascade() | Ensemble()) as scored if scored.num_scored > 1:
                    called += called[-1:] * (scored.num_scored - 1)
            num_calls[name] = sum(visit(model, (*path, name)) for model in called)
            if num_calls[name] > MAX_CALLS:
                raise FlowError(
                    f"{_place(name)}: may make {num_calls[name]} calls; at most {MAX_CALLS} may be"
                )
        return num_calls[name]

    def _place(name: str) -> str:
        return f"models[{list(flows).index(name)}]"

    for name in flows:
        visit(name, ())
