"""Files and batches in the small world: their functions, compared with the reference."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from contract.api_keys import KeyTerms
from contract.batches import (
    Batches,
    BatchesFull,
    BatchStatus,
    LeaseLost,
    NewBatch,
    Part,
    StatusChanged,
)
from contract.callbacks import Callback
from contract.errors import BatchwayError
from contract.files import Files, FilesFull, StoredFile
from contract.jobs import Endpoint
from tests.oracle.reference_files import PART_DELAY_MS

if TYPE_CHECKING:
    from tests.oracle.world import World

LEASE_S = 10.0
NO_FILE, NO_BATCH = "file-" + "f" * 32, "batch_" + "f" * 32
_PAGE = 2


class Feeders:
    """The callers of files and batches, and the gateways that run batches and delete objects."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._files = Files(world.async_client, world.keys)
        self._batches = Batches(world.async_client, world.keys)
        self.file_ids: list[str] = []  # the youngest last; also forgotten ones
        self.batch_ids: list[str] = []
        self.held: list[tuple[str, str]] = []  # batch and token of each lease, also of lapsed ones
        self._tokens: list[str] = []

    # --- files --------------------------------------------------------------------------------

    def begin_file(self, *, is_lost: bool, upload_s: float) -> None:
        """A caller's upload, which is never recorded where it `is_lost`."""
        number = len(self.file_ids)
        file_id = f"file-{'e' * 8}{number:024x}" if is_lost else f"file-{number:032x}"
        begin = self._files.begin, self._there.files.begin
        self._both("file_begin", *begin, file_id, upload_s=upload_s)

    def add_file(
        self,
        tenant: str,
        num_bytes: int,
        *,
        repeats: str | None,
        lifetime_s: float,
        max_tenant_bytes: int,
    ) -> None:
        """`repeats`: the id of an earlier file, perhaps with other bytes."""
        file_id = repeats or f"file-{len(self.file_ids):032x}"
        if repeats is None:
            self.file_ids.append(file_id)
        file = StoredFile(
            id=file_id, tenant=tenant, num_bytes=num_bytes, purpose="batch", filename="ä b"
        )
        terms = {"lifetime_s": lifetime_s, "max_tenant_bytes": max_tenant_bytes}
        self._both("file_add", self._files.add, self._there.files.add, file, **terms)

    def drop(self, file_id: str, tenant: str) -> None:
        self._both("file_drop", self._files.drop, self._there.files.drop, file_id, tenant)

    def delete_due(self, max_ids: int, *, is_lost: bool) -> None:
        """What a gateway does with expired files, and with objects that nobody needs. `is_lost`:
        it dies before it reports the last of them."""
        due: list[str] = self._both("objects_due", self._files.due, self._there.files.due, max_ids)
        for each in due:
            if each.startswith("file-"):
                self.drop(each, "")
            if not is_lost or each != due[-1]:
                self._both("objects_deleted", self._files.deleted, self._deleted, each)

    def _deleted(self, object_id: str, *, now_ms: int) -> None:
        del now_ms
        self._there.files.deleted(object_id)

    # --- batches ------------------------------------------------------------------------------

    def add_batch(
        self,
        tenant: str,
        *,
        repeats: str | None,
        window_s: float,
        callback: Callback | None,
        max_open: int,
    ) -> None:
        batch_id = repeats or f"batch_{len(self.batch_ids):032x}"
        if repeats is None:
            self.batch_ids.append(batch_id)
        asked = NewBatch(
            endpoint=Endpoint.CHAT,
            input_file_id=self.file_ids[-1] if self.file_ids else NO_FILE,
            completion_window="24h",
            terms=KeyTerms(tenant=tenant),
            metadata={"colour": "red"},
            output_lifetime_s=3600,
        )
        terms = {"window_s": window_s, "callback": callback, "max_open": max_open}
        self._both(
            "batch_add", self._batches.add, self._there.batches.add, batch_id, asked, **terms
        )

    def cancel(self, batch_id: str, tenant: str) -> None:
        self._both(
            "batch_cancel", self._batches.cancel, self._there.batches.cancel, batch_id, tenant
        )

    def take(
        self, max_batches: int, *, in_progress: bool, max_more: int = 0, repeats: bool = False
    ) -> None:
        """`repeats`: the token of the call before, whose reply was lost."""
        if not repeats or not self._tokens:
            self._tokens.append(f"{len(self._tokens):016x}")
        token, terms = self._tokens[-1], {"lease_s": LEASE_S, "in_progress": in_progress}
        terms |= {"max_batches": max_batches, "max_more": max_more}
        batch_ids = self._both(
            "batch_take", self._batches.take, self._there.batches.take, token, **terms
        )
        self.held += [(batch_id, token) for batch_id in batch_ids]

    def save(
        self,
        batch_id: str,
        token: str,
        *,
        lease_s: float = LEASE_S,
        expected: BatchStatus | None = None,
        status: BatchStatus | None = None,
        part: tuple[int, Part | None] | None = None,
        fields: Mapping[str, int],
    ) -> None:
        progress = {"expected": expected, "status": status, "part": part, "fields": fields}
        self._both(
            "batch_save",
            self._batches.save,
            self._there.batches.save,
            *(batch_id, token),
            lease_s=lease_s,
            **progress,
        )

    # --- the comparison -----------------------------------------------------------------------

    def settle(self) -> None:
        """Feeders end all batches, and gateways delete what is due."""
        while any(not record.has_ended for record in self._there.batches.records.values()):
            self._world.pass_time(LEASE_S)
            for in_progress in (False, True):
                self.take(1000, in_progress=in_progress)
            for batch_id, token in self.held[-1000:]:
                self.save(batch_id, token, status=BatchStatus.FAILED, fields={})
        while self._there.files.due_ms:
            self._world.pass_time(PART_DELAY_MS / 1000)
            self.delete_due(1000, is_lost=False)

    def compare(self, tenants: tuple[str, ...]) -> None:
        """Files and batches are those of the reference, as callers list them and feeders read
        them."""
        if not self.file_ids and not self.batch_ids:
            return
        self._world.hold_clock()
        call, now_ms = self._world.loop.run_until_complete, self._there.now_ms
        files, batches = self._there.files, self._there.batches
        for tenant in tenants:
            assert call(self._files.tenant_bytes(tenant)) == files.tenant_bytes(tenant), tenant
            after = ""
            while page := files.page(tenant, after=after, max_files=_PAGE, now_ms=now_ms):
                terms: dict[str, Any] = {"purpose": "batch", "is_oldest_first": True}
                found = call(self._files.page(tenant, after=after, max_files=_PAGE, **terms))
                assert found == page, f"files of {tenant}: {found}, the reference {page}"
                after = page[-1].id
            after = ""
            while listed := batches.page(tenant, after=after, max_batches=_PAGE):
                there = call(self._batches.page(tenant, after=after, max_batches=_PAGE))
                assert there == listed, f"batches of {tenant}: {there}, the reference {listed}"
                after = listed[-1].id
        for batch_id, record in batches.records.items():
            parts = call(self._batches.parts(batch_id))
            assert parts == record.parts, f"{batch_id}: {parts}, the reference {record.parts}"
        rows: Any = self._world.client.zrange(
            self._world.keys.of("objects_due"), 0, -1, withscores=True
        )
        due = {each.decode(): int(due_ms) for each, due_ms in rows}
        assert due == files.due_ms, f"objects due: {due}, the reference {files.due_ms}"

    @property
    def _there(self) -> Any:
        return self._world.reference

    def _both(
        self,
        name: str,
        call: Callable[..., Awaitable[Any]],
        reference: Callable[..., Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        """Calls function and reference, and compares the replies."""
        self._world.hold_clock()
        try:
            here = reference(*args, **options, now_ms=self._there.now_ms)
        except BatchwayError as error:
            here = _told(error)

        async def run() -> Any:
            try:
                return await call(*args, **options)
            except (BatchesFull, FilesFull, LeaseLost, StatusChanged) as error:
                return _told(error)

        there = self._world.loop.run_until_complete(run())
        assert there == here, f"{name}: Redis said {there!r}, the reference {here!r}"
        self._world.replies[f"{name} {_kind(there)}"] += 1
        self._world.after_step()
        return there


def _told(error: BatchwayError) -> tuple[str, str]:
    detail = error.num_bytes if isinstance(error, FilesFull) else ""
    return type(error).__name__, str(detail)


def _kind(reply: Any) -> str:
    """A short name of a reply, for counting them."""
    if isinstance(reply, list):
        return "some" if reply else "nothing"
    if isinstance(reply, tuple):
        return str(reply[0])
    return "a file" if isinstance(reply, msgspec.Struct) else str(reply)
