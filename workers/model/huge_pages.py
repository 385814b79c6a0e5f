"""Puts a CPU's weights and KV cache on 2 MiB pages, on Linux.

A step reads all weights once. With 4 KiB pages that needs many page table entries, and hardware
prefetching stops at each page's end. Does nothing if the system setting is `never`.
"""

import ctypes
import mmap
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

_PAGE_BYTES = 2**21
# Smaller mappings hold no weights.
_SMALLEST_BYTES = 2**22
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPPINGS = Path("/proc/self/smaps")
# Private, writable and not of a file: where allocators put large tensors.
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0 *(\[heap\])?$")
_RESIDENT = re.compile(r"Rss: +(\d+) kB$")
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1


def use_huge_pages(untouched: Iterable[Tensor]) -> int:
    """Converts all large mappings of this process, and `untouched` tensors, which nobody has
    written to yet. Returns the bytes converted; 0 if the system has no such pages."""
    if not _ENABLED.exists() or "[never]" in _ENABLED.read_text():
        return 0
    _give_back()
    for tensor in untouched:
        _advise(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, _MADV_HUGEPAGE)
    num_bytes = 0
    for begin, end in list(_filled_mappings()):
        if _advise(begin, end, _MADV_HUGEPAGE):
            num_bytes += _collapse(begin, end)
    return num_bytes


def touch(tensors: Sequence[Tensor], num_bytes: int) -> None:
    """Makes the system provide the first `num_bytes` of pages of each tensor now, without changing
    content. If that fails, pages come on the first write, as usual."""
    for tensor in tensors:
        begin = tensor.data_ptr()
        end = begin + min(tensor.nbytes, num_bytes // len(tensors))
        _advise(begin, end, _MADV_POPULATE_WRITE, page_bytes=mmap.PAGESIZE)


def _give_back() -> None:
    """Returns memory that glibc's allocator holds free (say, weights before conversion) to the
    system; it would be converted as well."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes = (ctypes.c_size_t,)
        trim(0)


def _filled_mappings() -> Iterator[tuple[int, int]]:
    """Addresses of large anonymous mappings that are mostly in use."""
    span = None
    for line in _MAPPINGS.read_text().splitlines():
        if found := _ANONYMOUS.match(line):
            span = int(found[1], 16), int(found[2], 16)
        elif "-" in line.split(" ", 1)[0]:
            span = None
        elif span is not None and (resident := _RESIDENT.match(line)):
            is_filled = int(resident[1]) * 1024 >= _SMALLEST_BYTES
            yield from [span] * is_filled


def _collapse(begin: int, end: int) -> int:
    """Bytes converted in a mapping; a mapping with holes is converted page by page."""
    if _advise(begin, end, _MADV_COLLAPSE):
        return end - begin
    pages = range(-(-begin // _PAGE_BYTES) * _PAGE_BYTES, end - _PAGE_BYTES + 1, _PAGE_BYTES)
    return sum(_PAGE_BYTES * _advise(at, at + _PAGE_BYTES, _MADV_COLLAPSE) for at in pages)


def _advise(begin: int, end: int, advice: int, page_bytes: int = _PAGE_BYTES) -> bool:
    """Advises the whole pages within the range; returns whether the system accepted."""
    first, last = -(-begin // page_bytes) * page_bytes, end // page_bytes * page_bytes
    if last <= first:
        return False
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(libc.madvise(first, last - first, advice)) == 0
