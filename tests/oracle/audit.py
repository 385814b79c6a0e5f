"""Checks the invariants of docs/protocol.md on the contents of Redis.

A violation names the key without its tag, the field, its value, and the value by the records.
"""

import hashlib
import math
import struct
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import redis

from contract.codec import decode_logged
from contract.events import End, LogEntry, Members, Tokens
from contract.jobs import TERMINAL_STATUSES
from contract.keys import Keys
from infra.check_command import Contents, expected
from tests.clock import clock_of
from tests.oracle.audit_files import FilesAudit
from tests.oracle.findings import Record, members, same

# As in contract/lua.
FIRST_HASH = "00000000"
MAX_RELEASES = 32
EVENT_BYTES = 40  # of a log's entry, beside the event

TERMINAL = {status.value for status in TERMINAL_STATUSES}


@dataclass
class Audit:
    """Keeps what it saw earlier, to check also values that may never change or decrease."""

    client: Any  # redis.Redis, whose replies are typed as bytes or str
    keys: Keys
    logs: dict[str, list[LogEntry]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    _rows: dict[str, Any] = field(default_factory=dict)
    _sound_rows: dict[str, Any] = field(default_factory=dict)  # logs that were checked before
    _ttls: dict[str, tuple[int, int]] = field(default_factory=dict)
    _memory_used: dict[str, int] = field(default_factory=dict)  # of record and log

    def __post_init__(self) -> None:
        self._files = FilesAudit(self.client, self.keys)

    def check(self) -> None:
        """Raises AssertionError at the first violated invariant."""
        jobs = self._jobs()
        waiting, pending = self._queue_entries()
        leases = {i.decode() for i in self.client.zrange(self.keys.of("leases"), 0, -1)}
        for job_id, job in jobs.items():
            kind = self._check_place(job_id, job, waiting, pending, leases)
            self._check_log(job_id, job)
            self._check_bounds(job_id, job)
            self._check_bill(job, kind)
            if kind == "terminal":
                ttls = dict(zip(("record", "log"), self._ttls[job_id], strict=True))
                assert min(ttls.values()) > 0, f"I15: {job.key} expires, and its log: {ttls} ms"
        try:
            by_records = expected(jobs)
        except ValueError as exc:
            raise AssertionError(f"a record has a field that is no number: {exc}") from exc
        self._check_lists(jobs, by_records)
        self._check_outbox(jobs)
        strangers = (waiting.keys() | pending.keys() | leases) - jobs.keys()
        assert not strangers, f"nothing waits or runs without a record: {sorted(strangers)[:5]}"
        self._check_counters(_of(by_records, "counters:"))
        self._check_later(by_records)
        self._check_early(jobs)
        self._check_lines(_of(by_records, "line:"))
        self._check_tenants(_of(by_records, "tenant:"))
        quarantined = {i.decode() for i in self.client.zrange(self.keys.of("quarantine"), 0, -1)}
        on_record = {i.decode() for i in self.client.hkeys(self.keys.of("poison"))}
        same(
            "poison is on record", {"poison": members(on_record)}, {"poison": members(quarantined)}
        )
        self._check_sets("own:", _of(by_records, "own:"))
        self._check_sets("alone:", _of(by_records, "alone:"))
        self._files.check()

    def check_all_ended(self) -> None:
        """After faults have stopped and every deadline has passed: I14."""
        self.check()
        open_jobs = {key: job["state"] for key, job in self._jobs().items()}
        left = {job_id: state for job_id, state in open_jobs.items() if state not in TERMINAL}
        assert not left, f"I14: every job ends: {left}"

    def check_at_rest(self) -> None:
        """After every retention of jobs is over: I15."""
        self.check()
        passing = ("job:*", "log:*", "jobs:*", "kept", "leases", "deadlines", "attended")
        left = [
            key.decode()
            for pattern in (
                *passing,
                *("outbox", "due:*", "flying:*", "stored:*"),
                "own:*",
                "run:*",
                "q:*",
                "back:*",
                "alone:*",
                "line:*",
                "later*",
                "early:*",
                "chats:*",
            )
            for key in self.client.keys(f"{self.keys.tag}:{pattern}")
        ]
        assert left == [], f"I15: nothing is left behind: {left}"

    def check_files_at_rest(self) -> None:
        """After the end of every file and batch, too, which may be kept for longer: I15."""
        self._files.check_at_rest()

    # --- contents of Redis --------------------------------------------------------------------

    def _jobs(self) -> dict[str, Record]:
        """The records by id. Their logs and times to live are fetched in the same round trip."""
        prefix = self.keys.of("job", "")
        job_ids = [key.decode()[len(prefix) :] for key in self.client.keys(f"{prefix}*")]
        with self.client.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hgetall(self.keys.of("job", job_id))
                pipe.xrange(self.keys.of("log", job_id))
                pipe.pttl(self.keys.of("job", job_id))
                pipe.pttl(self.keys.of("log", job_id))
                pipe.memory_usage(self.keys.of("job", job_id), samples=0)
                pipe.memory_usage(self.keys.of("log", job_id), samples=0)
            replies: Any = pipe.execute()
        jobs = {}
        for index, job_id in enumerate(job_ids):
            raw, rows, job_ttl, log_ttl, *used = replies[6 * index : 6 * index + 6]
            self._memory_used[job_id] = sum(filter(None, used))
            for binary in (b"job", b"metadata", b"result", b"callback"):
                raw[binary] = raw[binary].hex().encode() if binary in raw else b""
            fields = {name.decode(): value.decode(errors="replace") for name, value in raw.items()}
            jobs[job_id] = Record(f"job:{job_id}", fields)
            self._rows[job_id] = rows
            self._ttls[job_id] = (job_ttl, log_ttl)
        self._complete(jobs)
        return jobs

    def _complete(self, jobs: dict[str, Record]) -> None:
        """Adds the progress of running jobs, packed in their workers' hashes. Other packed progress
        must equal the record."""
        prefix = self.keys.of("run", "")
        for key in self.client.keys(f"{prefix}*"):
            packed: Any = self.client.hgetall(key)
            for raw_id, raw in packed.items():
                owner, job_id = key.decode()[len(prefix) :], raw_id.decode()
                assert job_id in jobs, f"run:{owner} {job_id}: there is no such record"
                job = jobs[job_id]
                epoch, number, tokens, log_bytes, hash_, deadline, max_tokens, to_do = (
                    struct.unpack_from("<xdddd8sddd", raw)
                )
                left = job.number("cost") - job.number("prompt_tokens") - int(tokens)
                found = {
                    "owner": owner,
                    "epoch": epoch,
                    "deadline": deadline,
                    "max_tokens": max_tokens,
                    "to_do": to_do,
                    "place": raw[struct.calcsize("<xdddd8sddd") :].decode(),
                }
                numbers = {name: job.number(name) for name in ("epoch", "deadline", "max_tokens")}
                place = f"{job['lane']:8} {job['model']}\0{job.get('channel', '')}\0"
                wanted = {"owner": job["owner"], **numbers, "to_do": max(0, left), "place": place}
                same("packed as on record", {f"run:{owner}": found}, {f"run:{owner}": wanted})
                job |= {"next": str(int(number)), "tokens": str(int(tokens))}
                job |= {"hash": hash_.decode(), "log_bytes": str(int(log_bytes))}

    def _queue_entries(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Jobs with a queue entry that no worker has, and jobs with a pending entry."""
        waiting: dict[str, list[str]] = defaultdict(list)
        pending: dict[str, list[str]] = defaultdict(list)
        tag = self.keys.tag
        for key in [*self.client.keys(f"{tag}:q:*"), *self.client.keys(f"{tag}:back:*")]:
            stream = key.decode()[len(tag) + 1 :]
            rows: Any = self.client.xpending_range(key, "workers", "-", "+", 10_000)
            handed_out = {row["message_id"] for row in rows}
            entries: Any = self.client.xrange(key)
            gone = handed_out - {entry for entry, _ in entries}
            assert not gone, f"I1: nothing pending is gone: {stream} {sorted(gone)}"
            for entry, fields in entries:
                place = pending if entry in handed_out else waiting
                place[fields[b"id"].decode()].append(f"{stream} {entry.decode()}")
        return waiting, pending

    def _log(self, job_id: str, tenant: str) -> list[LogEntry]:
        """The log as callers read it."""
        try:
            reply: Any = self.client.fcall_ro(
                "batchway_v1_read", 1, self.keys.tag, job_id, tenant, 0, 100_000
            )
        except redis.ResponseError as exc:
            raise AssertionError(f"job:{job_id}: read fails: {exc}") from exc
        assert reply[0] == b"OK", f"job:{job_id}: read says {reply[0]!r}"
        return [decode_logged(raw) for raw in reply[2]]

    def _log_bytes(self, job_id: str) -> int:
        sizes = [len(row.get(b"s", b"")) for _, row in self._rows[job_id]]
        return sum(math.ceil((size + EVENT_BYTES) * 1.25) for size in sizes)

    # --- invariants ---------------------------------------------------------------------------

    def _check_place(
        self,
        job_id: str,
        job: Record,
        waiting: dict[str, list[str]],
        pending: dict[str, list[str]],
        leases: set[str],
    ) -> str:
        """I1, I2: each job is terminal, queued or running."""
        states = {"queued": "queued", "claimed": "running", "streaming": "running"}
        kind = "terminal" if job["state"] in TERMINAL else states.get(job["state"], "")
        assert kind, f"I2: {job.key} state: holds {job['state']!r}"
        place = [] if kind == "terminal" else [f"{job['stream']} {job['entry']}"]
        found = {
            "waits at": waiting.get(job_id, []),
            "is pending at": pending.get(job_id, []),
            "has a lease": job_id in leases,
            "has an owner": job["owner"] != "",
        }
        wanted = {
            "waits at": place if kind == "queued" else [],
            "is pending at": place if kind == "running" else [],
            "has a lease": kind == "running",
            "has an owner": kind == "running",
        }
        same(f"I1: a {kind} job", {job.key: found}, {job.key: wanted})
        return kind

    def _check_log(self, job_id: str, job: Record) -> None:
        """I3, I4, I5, the chain of hashes and the log's bytes."""
        num_bytes = self._log_bytes(job_id)
        if job["state"] not in TERMINAL:
            noted = int(job.get("log_bytes", "0"))
            assert noted == num_bytes, f"I16: {job.key} log_bytes: {noted}, the log has {num_bytes}"
        if self._rows[job_id] and self._rows[job_id] == self._sound_rows.get(job_id):
            last = self.logs[job_id][-1].number
            assert last == job.number("next") - 1, f"I3: {job.key} next: the log ends at {last}"
            return
        log = self._log(job_id, job["tenant"])
        if job["result"]:
            here = [(e.number, e.event.status) for e in log]  # type: ignore[union-attr]
            assert here == [(job.number("next") - 1, job["state"])], (
                f"I5: of a log that is kept elsewhere, the end is here: {job.key} has {here}"
            )
            self.logs[job_id], self._sound_rows[job_id] = log, self._rows[job_id]
            return
        numbers = [entry.number for entry in log]
        assert numbers == list(range(1, job.number("next"))), (
            f"I3: no gap, no overlap: log:{job_id} has {numbers}, next is {job['next']}"
        )
        positions: dict[int, int] = defaultdict(int)
        chain = FIRST_HASH
        for entry in log:
            if isinstance(entry.event, Tokens):
                for delta in entry.event.deltas:
                    start = positions[delta.choice]
                    assert delta.start == start, (
                        f"I3: log:{job_id} {entry.number} begins at {delta.start}, not {start}"
                    )
                    positions[delta.choice] += len(delta.token_ids)
            raw = msgspec.msgpack.encode(entry.event)
            chain = hashlib.sha1(chain.encode() + raw, usedforsecurity=False).hexdigest()[:8]
            assert entry.hash == chain, (
                f"a hash covers the log before it: log:{job_id} {entry.number} has {entry.hash}, "
                f"not {chain}"
            )
        ends = {entry.number: entry.event.status for entry in log if isinstance(entry.event, End)}
        wanted_ends = {len(log): job["state"]} if job["state"] in TERMINAL else {}
        assert ends == wanted_ends, f"I5: log:{job_id} ends at {ends}, the state is {job['state']}"
        num_logged = sum(positions.values())
        counted = {num_logged}
        if job.get("part") in ("parent", "nested"):
            # Its last event before the end counts its calls' other output.
            counted.add(max(num_logged, _num_called(log)))
        else:
            num_cached = sum(e.event.num_cached for e in log if isinstance(e.event, Tokens))
            assert int(job.get("cached", "0")) == num_cached, (
                f"cached tokens are counted: {job.key} has {job.get('cached')}, not {num_cached}"
            )
        assert job.number("tokens") in counted, (
            f"tokens are counted: {job.key} tokens: holds {job['tokens']}, the log {num_logged}"
        )
        before = self.logs.get(job_id, [])
        assert log[: len(before)] == before, f"I4: logged events never change: log:{job_id}"
        self.logs[job_id] = log
        self._sound_rows[job_id] = self._rows[job_id]

    def _check_lists(self, jobs: dict[str, Record], by_records: Contents) -> None:
        """I15: every record is in its tenant's list, in that of all and in no other; an unfinished
        one has a deadline, an ended one an expiry."""
        prefix = self.keys.of("jobs", "")
        found = {
            key.decode()[len(prefix) :]: self._scores(key) for key in self.client.keys(f"{prefix}*")
        }
        wanted_lists = _of(by_records, "jobs:")
        of_all = {job_id: at for own in wanted_lists.values() for job_id, at in own.items()}
        if of_all:
            wanted_lists = {**wanted_lists, "jobs:": of_all}
        same(
            "I15: the lists of jobs",
            {f"jobs:{tenant}": listed for tenant, listed in found.items()},
            wanted_lists,
        )
        for tenant, chats in self._zsets("chats:").items():
            assert chats.items() <= found[tenant].items(), f"I15: chats:{tenant} are its jobs"
        for name, what in (
            ("deadlines", "a deadline for each open job"),
            ("kept", "I15: what will be forgotten"),
        ):
            same(what, {name: self._scores(self.keys.of(name))}, {name: by_records.get(name, {})})
        stored: Any = self.client.hgetall(self.keys.of("stored", "jobs"))
        sums: Counter[str] = Counter()
        lanes: Counter[str] = Counter()
        lines: Counter[str] = Counter()
        for raw_id, noted in stored.items():
            num_bytes, held_bytes, lane, owner = noted.decode().split()
            lanes[lane] += int(held_bytes)
            lines[f"{lane} {owner}"] += int(held_bytes)
            found_job = jobs.get(raw_id.decode())
            assert found_job is None or found_job["lane"] == lane, (
                f"I11: stored:jobs {raw_id}: {lane}"
            )
            # The log of a running job may be longer than expected: it is measured at the end.
            is_at_rest = found_job is not None and not found_job["owner"]
            used = self._memory_used[raw_id.decode()] if is_at_rest else 0
            if found_job is not None and found_job["state"] in TERMINAL:
                exact = found_job.number("fixed") + len(found_job["message"].encode())
                exact += 0 if found_job["result"] else self._log_bytes(raw_id.decode())
                assert int(held_bytes) == exact, f"I16: {raw_id}: {held_bytes}, not {exact}"
            assert int(held_bytes) >= used, (
                f"I16: what counts is what Redis allocates: {raw_id} {held_bytes}, takes {used}"
            )
            assert raw_id.decode() in found.get(owner, {}), f"I11: stored:jobs {raw_id}: {owner}"
            sums[owner] += int(num_bytes)
            sums[""] += int(num_bytes)
        held: Any = self.client.hgetall(self.keys.of("stored", "tenants"))
        counted = {tenant.decode(): int(num_bytes) for tenant, num_bytes in held.items()}
        same("I11: bytes stored", {"stored:tenants": counted}, {"stored:tenants": dict(sums)})
        for name, wanted in (("lanes", lanes), ("lines", lines)):
            raw: Any = self.client.hgetall(self.keys.of("stored", name))
            there = {key.decode(): int(value) for key, value in raw.items()}
            same("I16: bytes in Redis", {name: there}, {name: dict(wanted)})
        listed_ids = sorted(found.get("", {}))
        assert sorted(raw.decode() for raw in stored) == listed_ids, "I11: bytes stored of each job"

    def _scores(self, key: str | bytes) -> dict[str, int]:
        rows: Any = self.client.zrange(key, 0, -1, withscores=True)
        return {member.decode(): int(score) for member, score in rows}

    def _check_bounds(self, job_id: str, job: Record) -> None:
        """I6, I8."""
        epoch, before = job.number("epoch"), self.epochs.get(job_id, 0)
        assert epoch >= before, f"I6: {job.key} epoch: holds {epoch}, it was {before}"
        self.epochs[job_id] = epoch
        bounds = {
            "attempt": epoch,
            "releases": MAX_RELEASES,
            "crashes": 3,
        }
        if job.get("part") not in ("parent", "nested"):  # a flow's calls have caps of their own
            bounds["tokens"] = job.number("max_tokens")
        for name, most in bounds.items():
            assert 0 <= job.number(name) <= most, (
                f"I8: {job.key} {name}: holds {job[name]}, {most} at most"
            )

    def _check_counters(self, by_records: Contents) -> None:
        """I11. A field that was never incremented does not exist."""
        found = {
            key: {name: record.number(name) for name in record}
            for key, record in self._hashes("counters:").items()
        }
        wanted: dict[str, dict[str, int]] = {}
        for key in found | by_records:
            counted = {name: value for name, value in by_records.get(key, {}).items() if value}
            wanted[key] = dict.fromkeys(found.get(key, {}), 0) | counted
        same("I11: counters", found, wanted)

    def _check_early(self, jobs: dict[str, Record]) -> None:
        """What goes before jobs that came earlier waits in that queue."""
        for stream, zset in self._zsets("early:").items():
            for member in zset:
                found = {"early": {member: jobs[member.split()[-1]]["state"]}}
                same("what is early waits", found, {"early": {member: "queued"}})
                assert jobs[member.split()[-1]]["stream"] == stream, f"early:{stream} {member}"

    def _check_later(self, by_records: Contents) -> None:
        """I11: what waits for its time is listed by it; its tokens count by lane and tenant."""
        found = {"later": self._scores(self.keys.of("later"))}
        for key, record in self._hashes("later_tokens:").items():
            found[key] = {name: record.number(name) for name in record}
        wanted = {"later": dict(by_records.get("later", {}))}
        wanted |= _of(by_records, "later_tokens:")
        same("I11: what waits for its time", found, wanted)

    def _check_bill(self, job: Record, kind: str) -> None:
        """A reservation is charged or refunded at the job's end, and not before."""
        if kind != "terminal":
            assert "charge" not in job, f"a bill comes at the end: {job.key} charge"
            return
        used = job.number("prompt_tokens") + job.number("tokens") if job.number("epoch") else 0
        found = {name: job.number(name) for name in ("charge", "refund")}
        wanted = {"charge": used, "refund": job.number("cost") - used}
        same("what was used is charged, the rest refunded", {job.key: found}, {job.key: wanted})

    def _check_lines(self, by_records: Contents) -> None:
        """I11: each tenant's queue in a lane counts the jobs and tokens that wait in it."""
        found = {
            key: {name: record.number(name) for name in ("jobs", "tokens")}
            for key, record in self._hashes("line:").items()
        }
        same("I11: lines", found, by_records)

    def _check_tenants(self, by_records: Contents) -> None:
        """I11: a tenant's reservation is the cost of its unfinished jobs."""
        found = {}
        for key, record in self._hashes("tenant:").items():
            for name, value in record.items():
                assert float(value) >= 0, f"no figure is negative: {key} {name}: holds {value}"
            if record.number("reserved"):
                found[key] = {"reserved": record.number("reserved")}
            with self.client.pipeline() as pipe:  # at one moment
                pipe.hget(f"{self.keys.tag}:{key}", "reserved")
                pipe.ttl(f"{self.keys.tag}:{key}")
                reserved, ttl_s = pipe.execute()
            assert (ttl_s > 0) == (int(reserved or 0) == 0), (
                f"I15: idle ones go: {key} has {reserved}; it expires in {ttl_s} s"
            )
        wanted = {key: fields for key, fields in by_records.items() if any(fields.values())}
        same("I11: reservations", found, wanted)

    def _check_sets(self, kind: str, by_records: Contents) -> None:
        """I11: the sets by owner, and of the jobs that run alone, agree with the records."""
        prefix = f"{self.keys.tag}:"
        found = {
            key.decode()[len(prefix) :]: members({i.decode() for i in self.client.smembers(key)})
            for key in self.client.keys(f"{prefix}{kind}*")
        }
        wanted = {key: members(job_ids) for key, job_ids in by_records.items()}
        same(f"I11: {kind}", found, wanted)

    def _hashes(self, kind: str) -> dict[str, Record]:
        """The hashes of a family, by key without the tag."""
        prefix = f"{self.keys.tag}:"
        found = {}
        for raw_key in self.client.keys(f"{prefix}{kind}*"):
            key, raw = raw_key.decode()[len(prefix) :], self.client.hgetall(raw_key)
            found[key] = Record(key, {n.decode(): value.decode() for n, value in raw.items()})
        return found

    def _check_outbox(self, jobs: dict[str, Record]) -> None:
        """I12: one record for each end with a callback, in the one place given by its state."""
        places = {name: self._zsets(f"{name}:") for name in ("due", "flying", "dead")}
        places["due"] = {k: v for k, v in places["due"].items() if not k.startswith("of:")}
        self._check_held(places["flying"], records := self._outbox_records())
        wanted = {i for i, job in jobs.items() if "callback_to" in job and job["state"] in TERMINAL}
        untold = sorted(wanted - records.keys())
        assert not untold, f"I12: an end with a callback has a record: {untold[:5]}"
        for job_id, record in records.items():
            self._check_message(job_id, record, jobs.get(job_id), places)
        for kind, zsets in places.items():
            strangers = {i for z in zsets.values() for i in z} - records.keys()
            assert not strangers, f"I12: nothing else is {kind}: {sorted(strangers)[:5]}"
        self._check_turns(places["due"], places["flying"])

    def _check_message(
        self,
        job_id: str,
        record: Record,
        job: Record | None,  # None: forgotten since
        places: dict[str, dict[str, dict[str, float]]],
    ) -> None:
        state, what = record["state"], f"I12: {record.key}, {record['kind']}, {record['state']}"
        assert job is None or "callback_to" in job, f"{what}: only what has a callback has a record"
        has_ended = job is None or job["state"] in TERMINAL
        kinds = TERMINAL if has_ended else {"started", "progress"}
        assert record["kind"] in kinds, f"{what}: it reports the end once there is one"
        assert job is None or not has_ended or record["kind"] == job["state"], (
            f"{what}: the job is {job['state'] if job else 'forgotten'}"
        )
        assert state in ("due", "taken", "idle", "delivered", "dead"), what
        assert state != "idle" or not has_ended, f"{what}: no end is forgotten"
        assert state != "delivered" or "callback" not in record, (
            f"{what}: no secret outlives its use"
        )
        found = {name for name, zsets in places.items() for z in zsets.values() if job_id in z}
        place = {"due": {"due"}, "taken": {"flying"}, "dead": {"dead"}}.get(state, set())
        assert found == place, f"{what}: it is in {found}, not {place}"
        assert not has_ended or record["ttl"] != "-1", f"I15: {record.key} expires"

    def _check_turns(
        self, due: dict[str, dict[str, float]], flying: dict[str, dict[str, float]]
    ) -> None:
        """A destination is visited when one of its messages is due or a lease expires, and its
        tenant with it."""
        by_tenant = self._zsets("due:of:")
        tenants = self._zsets("outbox").get("", {})
        same("a turn for each tenant", {"": members(tenants)}, {"": members(by_tenant)})
        turns = {
            to: max(at, tenants[tenant])
            for tenant, destinations in by_tenant.items()
            for to, at in destinations.items()
        }
        wanted = members(due.keys() | flying.keys())
        same("a turn for each destination", {"outbox": members(turns)}, {"outbox": wanted})
        now_ms = self._now_ms()
        for to, at in turns.items():
            first = min([*due.get(to, {}).values(), *flying.get(to, {}).values()])
            is_full = bool(flying.get(to))  # its next visit may wait for running attempts
            last = min(flying[to].values()) if is_full else first
            assert at <= max(now_ms, last), f"no destination is forgotten: {to} until {at}"

    def _check_held(self, flying: dict[str, dict[str, float]], records: dict[str, Record]) -> None:
        """A tenant's leases are those of its messages in flight; they may have lapsed."""
        held = {key: flying.pop(key) for key in list(flying) if key.startswith("of:")}
        for leases in flying.values():
            for job_id, until_ms in leases.items():
                known = held.get(f"of:{records[job_id]['tenant']}", {}).pop(job_id, None)
                assert known == until_ms or until_ms <= self._now_ms(), f"{job_id} is held"
        lapsed = [at for leases in held.values() for at in leases.values()]
        assert max(lapsed, default=0) <= self._now_ms(), "nothing else is held"

    def _now_ms(self) -> float:
        """The clock of the functions, which a test may have moved or stopped."""
        offset: Any = self.client.get(clock_of(self.keys.partition)) or b"0"
        if offset.startswith(b"="):
            return float(offset[1:])
        seconds, microseconds = self.client.time()
        return float(seconds * 1000 + microseconds // 1000 + int(offset))

    def _outbox_records(self) -> dict[str, Record]:
        prefix = self.keys.of("out", "")
        keys = self.client.keys(f"{prefix}*")
        with self.client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hgetall(key)
                pipe.pttl(key)
            replies: Any = pipe.execute()
        records = {}
        for key, raw, ttl in zip(keys, replies[::2], replies[1::2], strict=True):
            fields = {n.decode(): v.decode(errors="replace") for n, v in raw.items()}
            job_id = key.decode()[len(prefix) :]
            records[job_id] = Record(f"out:{job_id}", fields | {"ttl": str(ttl)})
        return records

    def _zsets(self, kind: str) -> dict[str, dict[str, float]]:
        prefix = f"{self.keys.tag}:{kind}"
        found = {}
        for key in self.client.keys(f"{prefix}*"):
            rows: Any = self.client.zrange(key, 0, -1, withscores=True)
            found[key.decode()[len(prefix) :]] = {i.decode(): score for i, score in rows}
        return found


def _of(contents: Contents, kind: str) -> Contents:
    """The keys that begin so."""
    return {key: values for key, values in contents.items() if key.startswith(kind)}


def _num_called(log: Sequence[LogEntry]) -> int:
    """Output tokens of all calls of a flow."""
    events = (entry.event for entry in log if isinstance(entry.event, Members))
    last = {run.job_id: run.output_tokens for event in events for run in event.runs}
    return sum(last.values())
