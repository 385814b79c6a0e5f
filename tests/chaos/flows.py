"""Flows in a campaign: requests to them, and at the end their calls.

Each flow answers as the hash model itself would.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from contract.events import End, LogEntry, MemberRun, Members
from contract.functions import Functions
from contract.jobs import TERMINAL_STATUSES, Job, JobStatus
from gateway.redis.key_ring import DEFAULT_TENANT
from tests.chaos.ledger import Kind, Ledger, Violation
from tests.chaos.oracles import CHAT, Ask, HashOracle

_NUM_CALLS = {"cascade": 3, "vote": 3, "pipe": 3, "nested": 2}
_MAX_EVENTS = 100_000
_PASSED_ON = ("messages", "seed", "max_tokens", "temperature", "ignore_eos")
_FINAL = {name: "{{ input.%s }}" % name for name in _PASSED_ON}  # noqa: UP031 - braces
_MODEL = "m"
FLOWS = {
    "models": [
        {
            "name": "cascade",
            "cascade": {
                "members": [
                    {"model": _MODEL, "threshold": 1.0},
                    {"model": _MODEL, "threshold": 1.0},
                    {"model": _MODEL},
                ]
            },
        },
        {"name": "vote", "ensemble": {"members": [_MODEL] * 3, "combine": "vote"}},
        {"name": "nested", "ensemble": {"members": ["cascade", _MODEL], "combine": "vote"}},
        {
            "name": "pipe",
            "pipeline": {
                "batching": "staged",
                "steps": [
                    {
                        "name": "first",
                        "model": _MODEL,
                        "endpoint": "/v1/completions",
                        "body": {"prompt": "{{ input.messages[-1].content }}", "max_tokens": 9},
                    },
                    {
                        "name": "second",
                        "model": _MODEL,
                        "endpoint": "/v1/completions",
                        "body": {"prompt": "so: {{ first.choices[0].text }}", "max_tokens": 9},
                    },
                    {"name": "third", "model": _MODEL, "endpoint": CHAT, "body": _FINAL},
                ],
            },
        },
    ]
}
MODELS_YAML = json.dumps(FLOWS)  # which is YAML


class FlowOracle(HashOracle):
    """As the hash model, through flows."""

    def draw(self, rng: random.Random) -> Ask:
        ask = super().draw(rng)
        plain = {*_PASSED_ON, "model", "return_token_ids", "n", "prompt_cache_key"}
        flows = ["cascade", "vote", "nested"]
        if ask.endpoint == CHAT and set(ask.body) <= plain and ask.body["n"] == 1:
            flows += ["pipe"] * 2
        return replace(ask, body={**ask.body, "model": rng.choice(flows)})


async def check_calls(
    ledger: Ledger, functions: Functions, parents: Sequence[str], children: set[str]
) -> None:
    """Each call of a flow ran to one end and is told in its flow's log, and the flow's usage is
    that of its calls. `children`: the ids of all calls in Redis."""
    told: set[str] = set()
    for parent_id in parents:
        found = await functions.read(parent_id, DEFAULT_TENANT, max_events=_MAX_EVENTS)
        assert found is not None
        view, entries = found
        runs = _runs(entries)
        told |= runs.keys()
        ends = {
            job_id: await _end_of(ledger, functions, view.job, job_id)
            for job_id in runs
            if job_id in children
        }
        if view.status is not JobStatus.SUCCEEDED:
            continue
        num_calls = _NUM_CALLS[view.job.model]
        if len(ends) != num_calls:
            _violate(ledger, Kind.LOST, parent_id, f"{len(ends)} calls of {num_calls}")
        [end] = [entry.event for entry in entries if isinstance(entry.event, End)]
        known = [each for each in ends.values() if each is not None]
        sums = sum(e.prompt_tokens for e in known), sum(e.output_tokens for e in known)
        if sums != (end.prompt_tokens, end.output_tokens):
            detail = f"usage {end.prompt_tokens}, {end.output_tokens}; of its calls {sums}"
            _violate(ledger, Kind.WRONG, parent_id, detail)
        ledger.counts["calls of flows"] += len(ends)
        ledger.counts["flows that succeeded"] += 1
    for job_id in children - told:
        if ledger.cuts_s:  # Redis lost the flow, or what it told, and its call began afterwards
            ledger.num_rolled_back += 1
            continue
        _violate(ledger, Kind.DUPLICATED, job_id, "a call that no flow tells of")


def _runs(entries: Sequence[LogEntry]) -> Mapping[str, MemberRun]:
    events = (entry.event for entry in entries)
    members = (event for event in events if isinstance(event, Members))
    return {run.job_id: run for event in members for run in event.runs}


async def _end_of(ledger: Ledger, functions: Functions, parent: Job, job_id: str) -> End | None:
    """The one end of a call."""
    found = await functions.read(job_id, DEFAULT_TENANT, max_events=_MAX_EVENTS)
    assert found is not None
    view, entries = found
    if view.status not in TERMINAL_STATUSES or view.job.parent != parent.id:
        _violate(ledger, Kind.LOST, job_id, f"a call of {parent.id} that is {view.status}")
        return None
    ends = [entry.event for entry in entries if isinstance(entry.event, End)]
    if len(ends) != 1 or not isinstance(entries[-1].event, End):
        _violate(ledger, Kind.DOUBLE_TERMINAL, job_id, f"{len(ends)} ends of a call")
        return None
    return ends[0]


def _violate(ledger: Ledger, kind: Kind, story: str, detail: str) -> None:
    ledger.violations.append(Violation(kind, story, detail))
