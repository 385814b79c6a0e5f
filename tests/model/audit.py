"""Checks the invariants of docs/protocol.md on what really lies in Redis."""

import hashlib
import struct
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from contract.codec import decode_entry
from contract.events import End, LogEntry, Tokens
from contract.functions import FIRST_HASH
from contract.jobs import TERMINAL_STATUSES
from contract.keys import Keys
from contract.reference import MAX_RELEASES

TERMINAL = {status.value for status in TERMINAL_STATUSES}


@dataclass
class Audit:
    """Remembers what was seen, so that what may never change or fall is checked too."""

    client: Any  # redis.Redis, whose replies are typed as bytes or str
    keys: Keys
    logs: dict[str, list[LogEntry]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    _rows: dict[str, Any] = field(default_factory=dict)
    _sound_rows: dict[str, Any] = field(default_factory=dict)  # logs that were checked before
    _ttls: dict[str, tuple[int, int]] = field(default_factory=dict)

    def check(self) -> None:
        """Raises AssertionError at the first invariant that does not hold."""
        jobs = self._jobs()
        waiting, pending = self._queue_entries()
        leases = {i.decode() for i in self.client.zrange(self.keys.leases, 0, -1)}
        deadlines = {i.decode() for i in self.client.zrange(self.keys.deadlines, 0, -1)}
        counters: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        owners: dict[str, set[str]] = defaultdict(set)
        alone: dict[str, set[str]] = defaultdict(set)
        lines: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        reserved: dict[str, int] = defaultdict(int)
        for job_id, job in jobs.items():
            kind = self._check_place(job_id, job, waiting, pending, leases)
            self._check_log(job_id, job)
            self._check_bounds(job_id, job)
            assert (job_id in deadlines) == (kind != "terminal"), "a deadline for each open job"
            self._check_bill(job, kind)
            if kind == "terminal":
                assert min(self._ttls[job_id]) > 0, "I15: a finished job and its log expire"
                continue
            counts = counters[(job["model"], job["lane"])]
            counts[f"{kind}_jobs"] += 1
            counts[f"{kind}_tokens"] += int(job["cost"])
            reserved[job["tenant"]] += int(job["cost"])
            line = f"{job['model']}:{job['lane']}:{job['tenant']}"
            if kind == "queued" and job["stream"] == f"q:{line}":
                lines[line][0] += 1
                lines[line][1] += int(job["cost"])
            if kind == "running":
                done = int(job["prompt_tokens"]) + int(job["tokens"])
                counts["done_tokens"] += min(int(job["cost"]), done) if int(job["tokens"]) else 0
                owners[job["owner"]].add(job_id)
                if job["stream"].endswith(":suspect"):
                    alone[job["model"]].add(job_id)
        self._check_lists(jobs)
        self._check_outbox(jobs)
        known = waiting.keys() | pending.keys() | leases | deadlines
        assert known <= jobs.keys(), "nothing waits or runs without a record"
        self._check_counters(counters)
        self._check_lines(lines)
        self._check_tenants(reserved)
        quarantined = set(self.client.zrange(self.keys.quarantine, 0, -1))
        assert quarantined == set(self.client.hkeys(self.keys.poison)), "poison is on record"
        self._check_sets("own:", owners)
        self._check_sets("alone:", alone)

    def check_all_ended(self) -> None:
        """After faults have stopped and every deadline has passed: I14."""
        self.check()
        assert all(job["state"] in TERMINAL for job in self._jobs().values()), "I14: every job ends"

    def check_at_rest(self) -> None:
        """After every retention is over: I15."""
        self.check()
        passing = ("job:*", "log:*", "jobs:*", "kept", "leases", "deadlines", "attended")
        left = [
            key.decode()
            for pattern in (
                *passing,
                *("outbox", "due:*", "flying:*"),
                "own:*",
                "run:*",
                "q:*",
                "back:*",
                "alone:*",
                "line:*",
            )
            for key in self.client.keys(f"{self.keys.tag}:{pattern}")
        ]
        assert left == [], f"I15: nothing is left behind: {left}"

    # --- what lies in Redis -------------------------------------------------------------------

    def _jobs(self) -> dict[str, dict[str, str]]:
        """The records by id; their logs and times to live are fetched in the same round trip."""
        prefix = self.keys.job("")
        job_ids = [key.decode()[len(prefix) :] for key in self.client.keys(f"{prefix}*")]
        with self.client.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hgetall(self.keys.job(job_id))
                pipe.xrange(self.keys.log(job_id))
                pipe.pttl(self.keys.job(job_id))
                pipe.pttl(self.keys.log(job_id))
            replies: Any = pipe.execute()
        jobs = {}
        for index, job_id in enumerate(job_ids):
            raw, rows, job_ttl, log_ttl = replies[4 * index : 4 * index + 4]
            for binary in (b"job", b"metadata", b"result", b"callback"):
                raw[binary] = raw[binary].hex().encode() if binary in raw else b""
            jobs[job_id] = {name.decode(): value.decode() for name, value in raw.items()}
            self._rows[job_id] = rows
            self._ttls[job_id] = (job_ttl, log_ttl)
        self._complete(jobs)
        return jobs

    def _complete(self, jobs: dict[str, dict[str, str]]) -> None:
        """How far jobs are that go on, from what their workers' hashes hold, packed; what else is
        packed must be what the record says.
        """
        prefix = self.keys.running("")
        for key in self.client.keys(f"{prefix}*"):
            packed: Any = self.client.hgetall(key)
            for raw_id, raw in packed.items():
                job = jobs[raw_id.decode()]
                epoch, number, tokens, hash_, *rest = struct.unpack_from("<xddd8sddd", raw)
                place = raw[struct.calcsize("<xddd8sddd") :]
                assert job["owner"] == key.decode()[len(prefix) :], "what is packed is its owner's"
                to_do = max(0, int(job["cost"]) - int(job["prompt_tokens"]) - int(tokens))
                on_record = [int(job[name]) for name in ("epoch", "deadline", "max_tokens")]
                assert [epoch, *rest] == [*on_record, to_do], "packed as on record"
                assert place == f"{job['lane']:8} {job['model']}\0".encode()
                job |= {"next": str(int(number)), "tokens": str(int(tokens))}
                job["hash"] = hash_.decode()

    def _queue_entries(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Where jobs have an entry that no worker was handed, and where one that is pending."""
        waiting: dict[str, list[str]] = defaultdict(list)
        pending: dict[str, list[str]] = defaultdict(list)
        tag = self.keys.tag
        for key in [*self.client.keys(f"{tag}:q:*"), *self.client.keys(f"{tag}:back:*")]:
            stream = key.decode()[len(tag) + 1 :]
            rows: Any = self.client.xpending_range(key, "workers", "-", "+", 10_000)
            handed_out = {row["message_id"] for row in rows}
            entries: Any = self.client.xrange(key)
            assert handed_out <= {entry for entry, _ in entries}, "I1: nothing pending is gone"
            for entry, fields in entries:
                place = pending if entry in handed_out else waiting
                place[fields[b"id"].decode()].append(f"{stream} {entry.decode()}")
        return waiting, pending

    def _log(self, job_id: str, tenant: str) -> list[LogEntry]:
        """The log as callers read it, packed or not."""
        reply: Any = self.client.fcall_ro(
            "batchway_v1_read", 1, self.keys.tag, job_id, tenant, 0, 100_000
        )
        return [decode_entry(number, hash_, raw) for number, hash_, raw in reply[2]]

    # --- invariants ---------------------------------------------------------------------------

    def _check_place(
        self,
        job_id: str,
        job: dict[str, str],
        waiting: dict[str, list[str]],
        pending: dict[str, list[str]],
        leases: set[str],
    ) -> str:
        """I1, I2: terminal, queued or running, and nothing in between."""
        place = [f"{job['stream']} {job['entry']}"]
        if job["state"] in TERMINAL:
            assert job_id not in waiting.keys() | pending.keys() | leases, "I1: it has left"
            assert job["owner"] == "", "I1: a finished job has no owner"
            return "terminal"
        if job["state"] == "queued":
            assert waiting.get(job_id) == place, "I1: exactly one own entry"
            assert job_id not in pending.keys() | leases, "I1: a queued job is nobody's"
            assert job["owner"] == "", "I1: a queued job has no owner"
            return "queued"
        assert job["state"] in ("claimed", "streaming")
        assert pending.get(job_id) == place, "I1: its entry is pending"
        assert job_id not in waiting, "I1: exactly one own entry"
        assert job_id in leases, "I1: a running job has a lease"
        assert job["owner"], "I1: a running job has an owner"
        return "running"

    def _check_log(self, job_id: str, job: dict[str, str]) -> None:
        """I3, I4, I5 and the chain of hashes."""
        if self._rows[job_id] and self._rows[job_id] == self._sound_rows.get(job_id):
            assert self.logs[job_id][-1].number == int(job["next"]) - 1, "I3"
            return
        log = self._log(job_id, job["tenant"])
        if job["result"]:
            assert [(e.number, e.event.status) for e in log] == [  # type: ignore[union-attr]
                (int(job["next"]) - 1, job["state"])
            ], "I5: of a log that is kept elsewhere, the end is here"
            self.logs[job_id], self._sound_rows[job_id] = log, self._rows[job_id]
            return
        assert [e.number for e in log] == list(range(1, int(job["next"]))), "I3: no gap, no overlap"
        positions: dict[int, int] = defaultdict(int)
        chain = FIRST_HASH
        for entry in log:
            if isinstance(entry.event, Tokens):
                for delta in entry.event.deltas:
                    assert delta.start == positions[delta.choice], "I3: token positions"
                    positions[delta.choice] += len(delta.token_ids)
            raw = msgspec.msgpack.encode(entry.event)
            chain = hashlib.sha1(chain.encode() + raw, usedforsecurity=False).hexdigest()[:8]
            assert entry.hash == chain, "each hash covers the log before it"
        ends = [entry for entry in log if isinstance(entry.event, End)]
        assert len(ends) == (job["state"] in TERMINAL), "I5: one terminal event"
        assert not ends or ends == log[-1:], "I5: nothing after it"
        assert not ends or ends[0].event.status == job["state"], "I5"  # type: ignore[union-attr]
        assert sum(positions.values()) == int(job["tokens"]), "tokens are counted"
        before = self.logs.get(job_id, [])
        assert log[: len(before)] == before, "I4: logged events never change"
        self.logs[job_id] = log
        self._sound_rows[job_id] = self._rows[job_id]

    def _check_lists(self, jobs: dict[str, dict[str, str]]) -> None:
        """I15: every record is in its tenant's list and in no other; an ended one waits to be
        forgotten."""
        lists: dict[str, dict[str, int]] = defaultdict(dict)
        kept = {}
        for job_id, job in jobs.items():
            lists[job["tenant"]][job_id] = int(job["created"])
            if job["state"] in TERMINAL:
                has_objects = job["has_objects"] or "0"
                entry = f"{job_id} {has_objects} {job['tenant']}"
                kept[entry] = int(job["finished"]) + int(job["ttl_ms"])
        prefix = self.keys.jobs("")
        found = {
            key.decode()[len(prefix) :]: self._scores(key) for key in self.client.keys(f"{prefix}*")
        }
        assert found == lists, "I15: the lists of jobs"
        assert self._scores(self.keys.kept) == kept, "I15: what will be forgotten"

    def _scores(self, key: str | bytes) -> dict[str, int]:
        rows: Any = self.client.zrange(key, 0, -1, withscores=True)
        return {member.decode(): int(score) for member, score in rows}

    def _check_bounds(self, job_id: str, job: dict[str, str]) -> None:
        """I6, I8."""
        assert int(job["epoch"]) >= self.epochs.get(job_id, 0), "I6: epochs never fall"
        self.epochs[job_id] = int(job["epoch"])
        assert 0 <= int(job["attempt"]) <= int(job["epoch"]), "I8"
        assert int(job["releases"]) <= MAX_RELEASES, "I8"
        assert int(job["crashes"]) <= 3, "I8"
        assert int(job["tokens"]) <= int(job["max_tokens"]), "I8"

    def _check_counters(self, expected: dict[tuple[str, str], dict[str, int]]) -> None:
        """I11."""
        prefix = f"{self.keys.tag}:counters:"
        for key in self.client.keys(f"{prefix}*"):
            model, lane = key.decode()[len(prefix) :].split(":")
            raw: Any = self.client.hgetall(key)
            counted = {name.decode(): int(value) for name, value in raw.items()}
            want = expected.pop((model, lane), {})
            assert counted == {name: want.get(name, 0) for name in counted}, "I11: counters"
        assert not expected, "I11: every lane is counted"

    def _check_bill(self, job: dict[str, str], kind: str) -> None:
        """What was reserved is charged or refunded at the end, and not before."""
        if kind != "terminal":
            assert "charge" not in job, "a bill comes at the end"
            return
        used = int(job["prompt_tokens"]) + int(job["tokens"]) if int(job["epoch"]) else 0
        assert int(job["charge"]) == used, "what was used is charged"
        assert int(job["cost"]) == used + int(job["refund"]), "cost = charge + refund"

    def _check_lines(self, expected: dict[str, list[int]]) -> None:
        """I11: each tenant's line in a lane has the jobs and tokens that wait in it."""
        prefix = f"{self.keys.tag}:line:"
        found = {}
        for key in self.client.keys(f"{prefix}*"):
            raw: Any = self.client.hmget(key, "jobs", "tokens")
            found[key.decode()[len(prefix) :]] = [int(value) for value in raw]
        assert found == expected, "I11: lines"

    def _check_tenants(self, expected: dict[str, int]) -> None:
        """I11: what a tenant has reserved is the cost of its unfinished jobs."""
        prefix = self.keys.tenant("")
        found = {}
        for key in self.client.keys(f"{prefix}*"):
            raw: Any = self.client.hgetall(key)
            figures = {name.decode(): float(value) for name, value in raw.items()}
            assert min(figures.values()) >= 0, "no figure of a tenant is negative"
            found[key.decode()[len(prefix) :]] = int(figures["reserved"])
            assert (self.client.ttl(key) > 0) == (figures["reserved"] == 0), "I15: idle ones go"
        assert {tenant: n for tenant, n in found.items() if n} == expected, "I11: reservations"

    def _check_sets(self, kind: str, expected: dict[str, set[str]]) -> None:
        """I11: the sets by owner, and of the jobs run alone, hold what the records say."""
        prefix = f"{self.keys.tag}:{kind}"
        found = {
            key.decode()[len(prefix) :]: {i.decode() for i in self.client.smembers(key)}
            for key in self.client.keys(f"{prefix}*")
        }
        assert found == expected, f"I11: {kind}"

    def _check_outbox(self, jobs: dict[str, dict[str, str]]) -> None:
        """I12: one record for each end with a callback, in the one place that its state says."""
        places = {name: self._zsets(f"{name}:") for name in ("due", "flying", "dead")}
        records = self._outbox_records()
        wanted = {i for i, job in jobs.items() if "callback_to" in job and job["state"] in TERMINAL}
        assert wanted <= records.keys(), "I12: an end with a callback has a record"
        for job_id, record in records.items():
            state, job = record["state"], jobs.get(job_id)  # None: forgotten since
            assert job is None or "callback_to" in job, "I12: only what has a callback has a record"
            has_ended = job is None or job["state"] in TERMINAL
            told = TERMINAL if has_ended else {"started", "progress"}
            assert record["kind"] in told, "I12: it tells of the end once there is one"
            assert job is None or not has_ended or record["kind"] == job["state"], "I12"
            assert state in ("due", "taken", "idle", "delivered", "dead"), "I12"
            assert state != "idle" or not has_ended, "I12: no end is forgotten"
            assert state != "delivered" or "callback" not in record, "no secret outlives its use"
            found = {name for name, zsets in places.items() for z in zsets.values() if job_id in z}
            place = {"due": {"due"}, "taken": {"flying"}, "dead": {"dead"}}.get(state, set())
            assert found == place, f"I12: a {state} record is in {found}"
            assert not has_ended or record["ttl"] != "-1", "I15: it expires"
        for zsets in places.values():
            assert all(z.keys() <= records.keys() for z in zsets.values()), "I12: nothing else"
        self._check_turns(places["due"], places["flying"])

    def _check_turns(
        self, due: dict[str, dict[str, float]], flying: dict[str, dict[str, float]]
    ) -> None:
        """A destination is looked at once something of it is due, or a lease of it lapses."""
        rows: Any = self.client.zrange(self.keys.outbox, 0, -1, withscores=True)
        turns = {to.decode(): at for to, at in rows}
        assert turns.keys() == due.keys() | flying.keys(), "a turn for each destination"
        now_ms = self._now_ms()
        for to, at in turns.items():
            first = min([*due.get(to, {}).values(), *flying.get(to, {}).values()])
            is_full = bool(flying.get(to))  # its next look may wait for what is on its way
            last = min(flying[to].values()) if is_full else first
            assert at <= max(now_ms, last), "no destination is forgotten"

    def _now_ms(self) -> float:
        """The clock of the functions, which a test may have moved or stopped."""
        offset: Any = self.client.get(self.keys.clock_offset) or b"0"
        if offset.startswith(b"="):
            return float(offset[1:])
        seconds, microseconds = self.client.time()
        return float(seconds * 1000 + microseconds // 1000 + int(offset))

    def _outbox_records(self) -> dict[str, dict[str, str]]:
        prefix = self.keys.outbox_record("")
        keys = self.client.keys(f"{prefix}*")
        with self.client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hgetall(key)
                pipe.pttl(key)
            replies: Any = pipe.execute()
        records = {}
        for key, raw, ttl in zip(keys, replies[::2], replies[1::2], strict=True):
            fields = {n.decode(): v.decode(errors="replace") for n, v in raw.items()}
            records[key.decode()[len(prefix) :]] = fields | {"ttl": str(ttl)}
        return records

    def _zsets(self, kind: str) -> dict[str, dict[str, float]]:
        prefix = f"{self.keys.tag}:{kind}"
        found = {}
        for key in self.client.keys(f"{prefix}*"):
            rows: Any = self.client.zrange(key, 0, -1, withscores=True)
            found[key.decode()[len(prefix) :]] = {i.decode(): score for i, score in rows}
        return found
