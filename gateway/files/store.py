"""The object store that holds files and batches."""

import asyncio

from contract.payloads.store import ObjectStore, PayloadError
from gateway.http.errors import bad_request
from gateway.state import Gateway


def store_of(gateway: Gateway) -> ObjectStore:
    """Raises ApiError (400) if this installation has none."""
    store = gateway.broker.payloads.store
    if store is None:
        message = "files need an object store, which this gateway does not have"
        raise bad_request("no_object_store", message)
    return store


async def delete_objects(gateway: Gateway, object_id: str) -> None:
    """Deletes the objects of a file or batch that nobody needs. If deletion fails, the feeder
    repeats it."""
    try:
        await asyncio.to_thread(store_of(gateway).delete_job, object_id)
    except PayloadError:
        return
    await gateway.broker.ask_files(lambda files: files.deleted(object_id))
