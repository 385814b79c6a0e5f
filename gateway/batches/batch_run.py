"""Runs one leased batch: validates its file, runs its lines, joins their results."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import msgspec

from contract.batches import (
    PART_LINES,
    BatchStatus,
    LeaseLost,
    LineError,
    Part,
    StatusChanged,
)
from contract.connection import end_tasks
from contract.endpoints import VECTOR_ENDPOINTS
from contract.payloads.store import PayloadLost
from gateway.batches.lease import LeasedBatch
from gateway.batches.lines import BadLine, Line, Validation, parse_line
from gateway.batches.part_run import TEMPORARY, PartRun
from gateway.batches.result_files import write_results
from gateway.files.contents import lines
from gateway.http.errors import ApiError
from gateway.openai.admission import check_endpoint, check_lane

log = logging.getLogger("batchway.gateway")

_RUNNING = (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)


class InputLost(Exception):
    """The batch's file no longer exists."""


async def run_batch(leased: LeasedBatch) -> None:
    """Returns once the batch has ended. Raises LeaseLost."""
    while True:
        try:
            await leased.refresh()
            match leased.status:
                case BatchStatus.VALIDATING:
                    await _validate(leased)
                case status if status in _RUNNING:
                    await _run_lines(leased)
                case BatchStatus.FINALIZING:
                    await _finish(leased)
                case _:
                    log.info("ended batch_id=%s status=%s", leased.batch.id, leased.status)
                    return
        except StatusChanged:
            continue
        except InputLost:
            message = "the batch's file was deleted or has expired"
            await _fail(leased, [LineError("file_not_found", message, param="input_file_id")])
        except TEMPORARY:
            await asyncio.sleep(leased.gateway.settings.poll_s)


async def _validate(leased: LeasedBatch) -> None:
    settings = leased.gateway.settings
    validation = Validation(leased.batch.asked.endpoint, settings.max_batch_lines)
    await validation.run(_lines(leased))
    errors = validation.errors or await _model_errors(leased, validation.model)
    if errors:
        await _fail(leased, errors)
        return
    await leased.save(
        expected=BatchStatus.VALIDATING,
        status=BatchStatus.IN_PROGRESS,
        fields={"total": validation.num_lines, "model": validation.model},
    )


async def _model_errors(leased: LeasedBatch, model: str) -> list[LineError]:
    """Whether the model answers such calls in the batch lane."""
    card = (await leased.gateway.broker.known.models()).get(model)
    if card is None:
        return [LineError("model_not_found", "the model does not exist", 1, "body.model")]
    try:
        check_endpoint(card, leased.batch.asked.endpoint)
        check_lane(card, "batch")
    except ApiError as exc:
        return [LineError(exc.code, exc.message, 1, "body.model")]
    return []


async def _fail(leased: LeasedBatch, errors: Sequence[LineError]) -> None:
    """Ends the batch as failed, with the results of lines that have been run."""
    fields = await _result_fields(leased)
    fields["errors"] = msgspec.msgpack.encode(errors)
    await leased.save(status=BatchStatus.FAILED, fields=fields)


async def _lines(leased: LeasedBatch) -> AsyncIterator[bytes | None]:
    """Raises InputLost."""
    batch, broker = leased.batch, leased.gateway.broker
    file_id = batch.asked.input_file_id
    file = await broker.ask_files(lambda files: files.find(file_id, batch.tenant))
    if file is None:
        raise InputLost
    is_vectors = batch.asked.endpoint in VECTOR_ENDPOINTS
    most = leased.gateway.settings.body_bound(is_vectors=is_vectors)
    try:
        async for line in lines(leased.store, file_id, file.num_bytes, max_line_bytes=most):
            yield line
    except PayloadLost as exc:
        raise InputLost from exc


async def _run_lines(leased: LeasedBatch) -> None:
    """Runs a bounded number of parts at a time, except those that an earlier feeder has run."""
    done = await leased.gateway.broker.ask_batches(lambda batches: batches.parts(leased.batch.id))
    running: set[asyncio.Task[None]] = set()
    most = leased.gateway.settings.max_batch_jobs // PART_LINES
    try:
        if leased.batch.total:  # 0 if it was cancelled before it was validated
            async for number, part_lines in _parts(leased, done):
                running.add(asyncio.create_task(_run_part(leased, number, part_lines, done)))
                if len(running) == most:
                    running = await _some_done(running, asyncio.FIRST_COMPLETED)
        while running:
            running = await _some_done(running, asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(*running)
    if leased.status is BatchStatus.CANCELLING:
        await _end(leased, BatchStatus.CANCELLED)
    else:
        await leased.save(expected=BatchStatus.IN_PROGRESS, status=BatchStatus.FINALIZING)


async def _some_done(running: set[asyncio.Task[None]], when: str) -> set[asyncio.Task[None]]:
    """Those that still run. Raises what one of the others has raised."""
    ended, left = await asyncio.wait(running, return_when=when)
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
    """The number and the lines of each part that is to be run."""
    written = frozenset(done)
    part_lines: list[Line] = []
    index = -1
    async for raw in _lines(leased):
        index += 1
        number = index // PART_LINES
        if number in written:
            continue
        try:
            part_lines.append(parse_line(raw, index + 1, leased.batch.asked.endpoint))
        except BadLine as exc:  # the file was valid
            raise InputLost from exc
        if len(part_lines) == PART_LINES:
            yield number, part_lines
            part_lines = []
    if part_lines:
        yield index // PART_LINES, part_lines


async def _run_part(
    leased: LeasedBatch, number: int, part_lines: list[Line], done: dict[int, Part]
) -> None:
    """Raises LeaseLost."""
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


def _counts(parts: dict[int, Part]) -> dict[str, str | int | bytes]:
    return {
        "completed": sum(part.num_completed for part in parts.values()),
        "failed": sum(part.num_failed for part in parts.values()),
    }


async def _finish(leased: LeasedBatch) -> None:
    parts = await leased.gateway.broker.ask_batches(lambda batches: batches.parts(leased.batch.id))
    if sum(part.num_completed + part.num_failed for part in parts.values()) < leased.batch.total:
        await leased.save(status=BatchStatus.IN_PROGRESS)  # Redis has lost the last of them
        return
    is_cut_short = any(part.is_cut_short for part in parts.values())
    await _end(leased, BatchStatus.EXPIRED if is_cut_short else BatchStatus.COMPLETED)


async def _end(leased: LeasedBatch, status: BatchStatus) -> None:
    fields = await _result_fields(leased)
    await leased.save(expected=leased.status, status=status, fields=fields)


async def _result_fields(leased: LeasedBatch) -> dict[str, str | int | bytes]:
    """Writes the files of results; what the record says of them."""
    parts = await leased.gateway.broker.ask_batches(lambda batches: batches.parts(leased.batch.id))
    return {**await write_results(leased, parts), **_counts(parts)}


__all__ = ["LeaseLost", "run_batch"]
