"""Runs one leased batch: validates its file, runs its lines, joins their results."""

import asyncio
import contextlib
import functools
import io
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from tempfile import SpooledTemporaryFile
from typing import IO, Any

import msgspec

from contract.batches import (
    PART_LINES,
    BatchStatus,
    LineError,
    Part,
    StatusChanged,
    part_key,
    result_file_id,
)
from contract.connection import end_tasks
from contract.files import StoredFile, content_key
from contract.payloads.store import ObjectStore, PayloadLost
from gateway.files import Joined, lines, recorded
from gateway.http.errors import ApiError
from gateway.prepare.calls import check_endpoint, check_lane
from gateway.redis.known_models import NotAnnounced
from gateway.runners.batches.lease import LeasedBatch
from gateway.runners.batches.lines import BadLine, Line, Validation, parse_line, requests
from gateway.runners.batches.part_run import TEMPORARY, PartRun
from gateway.turns import Owner, work_for

log = logging.getLogger("batchway.gateway")


class PartLost(PayloadLost):
    """The object store no longer has all of a part's results."""

    def __init__(self, number: int) -> None:
        super().__init__(f"part {number} is missing or cut off")
        self.number = number


class _Joined(Joined):
    """The objects of parts, read one after another. Blocks. Raises PartLost, PayloadUnavailable."""

    def __init__(self, store: ObjectStore, objects: Sequence[tuple[int, str, int]]) -> None:
        """`objects`: each part's number, key and size."""
        super().__init__(store, [(key, num_bytes) for _, key, num_bytes in objects])
        self._numbers = {key: number for number, key, _ in objects}

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            return super().readinto(buffer)
        except PayloadLost as exc:
            raise PartLost(self._numbers[self._parts[-1][0]]) from exc


_BUFFER_BYTES = 256 * 1024


async def write_results(leased: LeasedBatch, parts: Mapping[int, Part]) -> dict[str, str]:
    """Writes the files that are not empty. Returns their ids by the names of the batch's fields.
    May be repeated. Raises PartLost, PayloadUnavailable."""
    sizes = {
        "output": {number: part.output_bytes for number, part in parts.items()},
        "error": {number: part.error_bytes for number, part in parts.items()},
    }
    fields = {}
    for kind, size_of in sizes.items():
        batch_id = leased.batch.id
        objects = [
            (number, part_key(batch_id, kind, number, parts[number].token), size_of[number])
            for number in sorted(size_of)
            if size_of[number]
        ]
        if objects:
            file = StoredFile(
                id=result_file_id(batch_id, kind),
                tenant=leased.batch.tenant,
                num_bytes=sum(size_of.values()),
                purpose="batch_output",
                filename=f"{batch_id}_{kind}.jsonl",
            )
            with io.BufferedReader(_Joined(leased.store, objects), _BUFFER_BYTES) as content:
                await asyncio.to_thread(leased.store.write, content_key(file.id), content)
            # even if the tenant's files have reached their limit
            await recorded(leased.gateway, file, leased.batch.asked.output_lifetime_s, 0)
            fields[f"{kind}_file_id"] = file.id
    return fields


class InputLost(Exception):
    """The batch's file no longer exists."""


async def run_batch(leased: LeasedBatch, *, runs_lines: bool) -> None:
    """Runs a batch to its end; unless it `runs_lines`, only until the batch is in progress. Raises
    LeaseLost."""
    terms = leased.batch.asked.terms
    work_for(Owner(terms.tenant, terms.weight, is_attended=False))
    while True:
        try:
            await leased.refresh()
            if leased.status not in _STEPS:
                log.info("ended batch_id=%s status=%s", leased.batch.id, leased.status)
                return
            if leased.status is BatchStatus.IN_PROGRESS and not runs_lines:
                return
            await _go_on(leased)
        except StatusChanged:
            continue
        except PartLost as exc:
            await _run_again(leased, exc.number)
        except TEMPORARY:
            await asyncio.sleep(leased.gateway.settings.poll_s)


async def _go_on(leased: LeasedBatch) -> None:
    """Takes the batch to its next status. Raises PartLost."""
    status = leased.status
    try:
        await _STEPS[status](leased)
    except InputLost:
        message = "the batch's file was deleted or has expired"
        await _fail(leased, status, [LineError("file_not_found", message, param="input_file_id")])


async def _run_again(leased: LeasedBatch, number: int) -> None:
    """Forgets a part whose results are lost, so that its lines are run again."""
    log.error("lost batch_id=%s part=%d; its lines run again", leased.batch.id, number)
    is_joined = leased.status is BatchStatus.FINALIZING
    status = BatchStatus.IN_PROGRESS if is_joined else None
    await leased.save(part=(number, None), status=status)


async def _validate(leased: LeasedBatch) -> None:
    settings = leased.gateway.settings
    bodies, endpoint = leased.gateway.bodies, leased.batch.asked.endpoint
    validation = Validation(endpoint, settings.max_batch_lines, bodies)
    await validation.run(_lines(leased))
    errors = validation.errors or await _model_errors(leased, validation)
    if errors:
        await _fail(leased, BatchStatus.VALIDATING, errors)
        return
    await leased.save(
        expected=BatchStatus.VALIDATING,
        status=BatchStatus.IN_PROGRESS,
        fields={"total": validation.num_lines, "model": validation.model},
    )


async def _model_errors(leased: LeasedBatch, validation: Validation) -> list[LineError]:
    """Returns errors unless the model answers such calls in the batch lane. Raises NotAnnounced."""
    number, broker = validation.first_number, leased.gateway.broker
    card = (await broker.known.models()).get(validation.model)
    if card is None:
        if validation.model in broker.known.declared:
            await broker.request_worker(leased.shard, validation.model)
            raise NotAnnounced(validation.model, None)
        return [LineError("model_not_found", "the model does not exist", number, "body.model")]
    try:
        check_endpoint(card, leased.batch.asked.endpoint)
        check_lane(card, "batch")
    except ApiError as exc:
        return [LineError(exc.code, exc.message, number, "body.model")]
    return []


async def _fail(leased: LeasedBatch, status: BatchStatus, errors: Sequence[LineError]) -> None:
    """Ends the batch, which had this status, with the results of lines that have been run."""
    parts = await leased.parts()
    fields: dict[str, Any] = {"errors": msgspec.msgpack.encode(errors)}
    await _end(leased, status, BatchStatus.FAILED, parts, fields)


async def _lines(leased: LeasedBatch) -> AsyncIterator[bytes | None]:
    """Raises InputLost."""
    batch, shard = leased.batch, leased.shard
    file_id = batch.asked.input_file_id
    file = await shard.ask("file", shard.files.find, file_id, batch.tenant)
    if file is None:
        raise InputLost
    most = leased.gateway.settings.max_body_bytes
    try:
        async for line in lines(leased.store, file_id, file.num_bytes, max_line_bytes=most):
            yield line
    except PayloadLost as exc:
        raise InputLost from exc


async def _run_lines(leased: LeasedBatch) -> None:
    """Runs a bounded number of parts at a time, except those that an earlier feeder has run. Raises
    InputLost once the parts that were read have ended, unless the batch is cancelled."""
    done = await leased.parts()
    running: set[asyncio.Task[None]] = set()
    most = leased.gateway.settings.max_batch_jobs // PART_LINES
    lost: InputLost | None = None
    try:
        try:
            if leased.batch.total:  # 0 if it was cancelled before it was validated
                async for number, part_lines in _parts(leased, done):
                    task = asyncio.create_task(_run_part(leased, number, part_lines, done))
                    task.add_done_callback(functools.partial(_close, part_lines[0].texts))
                    running.add(task)
                    if len(running) == most:
                        running = await _some_done(running)
        except InputLost as exc:
            lost = exc
        while running:
            running = await _some_done(running)
    finally:
        await end_tasks(*running)
    if leased.status is not BatchStatus.CANCELLING:
        if lost is not None:
            raise lost
        await leased.save(expected=BatchStatus.IN_PROGRESS, status=BatchStatus.FINALIZING)
        return
    parts = await leased.parts()
    if lost is not None or _has_all_lines(leased, parts):
        await _end(leased, BatchStatus.CANCELLING, BatchStatus.CANCELLED, parts)


def _close(texts: IO[bytes], _: object) -> None:
    texts.close()


async def _some_done(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Waits until a task has ended. Returns those that still run; raises an ended one's error."""
    ended, left = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    try:
        for task in ended:
            task.result()
    except BaseException:
        await end_tasks(*left)
        raise
    return left


async def _parts(
    leased: LeasedBatch, done: dict[int, Part]
) -> AsyncIterator[tuple[int, list[Line]]]:
    """Yields the number and the lines of each part that is to be run."""
    written = frozenset(done)
    part_lines: list[Line] = []
    index = -1
    most = leased.gateway.settings.max_batch_lines
    with contextlib.ExitStack() as unfinished:
        try:
            async for line_number, raw in requests(_lines(leased), most):
                index += 1
                number = index // PART_LINES
                if number in written:
                    continue
                if not part_lines:
                    texts = unfinished.enter_context(SpooledTemporaryFile[bytes](_BUFFER_BYTES))
                endpoint, bodies = leased.batch.asked.endpoint, leased.gateway.bodies
                part_lines.append(await parse_line(raw, line_number, endpoint, bodies, texts))
                if len(part_lines) == PART_LINES:
                    unfinished.pop_all()  # whoever runs the part closes its file
                    yield number, part_lines
                    part_lines = []
        except BadLine as exc:  # the file was valid
            raise InputLost from exc
        if part_lines:
            unfinished.pop_all()
            yield index // PART_LINES, part_lines


async def _run_part(
    leased: LeasedBatch, number: int, part_lines: list[Line], done: dict[int, Part]
) -> None:
    """Runs a part and records it. Raises LeaseLost."""
    run = PartRun(leased, number, part_lines)
    part = await run.run()
    done[number] = part
    while True:
        try:
            await leased.save(part=(number, part), fields=_counts(done))
            break
        except TEMPORARY:
            await asyncio.sleep(leased.gateway.settings.poll_s)
    await run.forget_jobs()


def _counts(parts: Mapping[int, Part]) -> dict[str, str | int | bytes]:
    return {
        "completed": sum(part.num_completed for part in parts.values()),
        "failed": sum(part.num_failed for part in parts.values()),
        "input_tokens": sum(part.num_input_tokens for part in parts.values()),
        "output_tokens": sum(part.num_output_tokens for part in parts.values()),
        "reasoning_tokens": sum(part.num_reasoning_tokens for part in parts.values()),
        "cached_tokens": sum(part.num_cached_tokens for part in parts.values()),
    }


async def _finish(leased: LeasedBatch) -> None:
    parts = await leased.parts()
    if not _has_all_lines(leased, parts):
        await leased.save(status=BatchStatus.IN_PROGRESS)
        return
    is_cut_short = any(part.is_cut_short for part in parts.values())
    status = BatchStatus.EXPIRED if is_cut_short else BatchStatus.COMPLETED
    await _end(leased, BatchStatus.FINALIZING, status, parts)


def _has_all_lines(leased: LeasedBatch, parts: Mapping[int, Part]) -> bool:
    """Whether the parts contain all lines; Redis may have lost the last parts."""
    num_lines = sum(part.num_completed + part.num_failed for part in parts.values())
    return num_lines >= leased.batch.total


async def _end(
    leased: LeasedBatch,
    expected: BatchStatus,
    status: BatchStatus,
    parts: Mapping[int, Part],
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Writes the files of results and records the end."""
    written = await write_results(leased, parts)
    fields = {**(fields or {}), **written, **_counts(parts)}
    await leased.save(expected=expected, status=status, fields=fields)


_STEPS: Mapping[BatchStatus, Callable[[LeasedBatch], Awaitable[None]]] = {
    BatchStatus.VALIDATING: _validate,
    BatchStatus.IN_PROGRESS: _run_lines,
    BatchStatus.CANCELLING: _run_lines,
    BatchStatus.FINALIZING: _finish,
}
