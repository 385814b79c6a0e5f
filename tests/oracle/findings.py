"""Values that an audit reads and compares, and the messages of its findings."""

from collections.abc import Iterable, Mapping


class Record(dict[str, str]):
    """A hash. Reading a missing field, or a number from a field without one, raises an
    AssertionError that names it."""

    def __init__(self, key: str, fields: Mapping[str, str]) -> None:
        super().__init__(fields)
        self.key = key

    def __missing__(self, name: str) -> str:
        raise AssertionError(f"{self.key} {name}: holds nothing, and every such record has it")

    def number(self, name: str) -> int:
        try:
            return int(self[name])
        except ValueError as exc:
            raise AssertionError(f"{self.key} {name}: holds {self[name]!r}, no number") from exc


def same(
    invariant: str,
    found: Mapping[str, Mapping[str, object]],
    wanted: Mapping[str, Mapping[str, object]],
) -> None:
    """Raises AssertionError with the keys and fields that differ from the records."""
    differences = [
        f"{key} {name}: holds {found.get(key, {}).get(name, 'nothing')!r}, "
        f"the records say {wanted.get(key, {}).get(name, 'nothing')!r}"
        for key in sorted(found.keys() | wanted.keys())
        for name in sorted(found.get(key, {}).keys() | wanted.get(key, {}).keys())
        if found.get(key, {}).get(name) != wanted.get(key, {}).get(name)
    ]
    assert not differences, f"{invariant}: {'; '.join(differences[:5])}"


def members(job_ids: Iterable[str]) -> dict[str, object]:
    """A set, in the form in which the fields of a hash are compared."""
    return dict.fromkeys(job_ids, "it")
