"""Notes what a module is called with and what it answers, and holds another module against that.

Calls are those of real forwards, so that a module is tried with the shapes and arguments that its
model uses. Leaves to `proof` which forwards these are.
"""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Largest difference of a row's element, as a share of the row's largest element.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


@dataclass(slots=True)
class Call:
    """One call of a module. Its tensors are copies: a model may add to them in place."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None

    def repeat(self, module: nn.Module) -> Any:
        """What another module answers to the same. Raises what it raises."""
        return module(*_copied(self.args), **_copied(self.kwargs))


Calls = dict[str, list[Call]]  # by the module's name


@contextmanager
def noting_calls(decoder: nn.Module, names: Iterable[str]) -> Iterator[Calls]:
    """Notes all calls of these modules within. A module that is not called has no entry."""
    calls: Calls = {}
    with ExitStack() as stack:
        for name in names:
            for handle in _note_calls(decoder.get_submodule(name), name, calls):
                stack.callback(handle.remove)
        yield calls


def _note_calls(module: nn.Module, name: str, calls: Calls) -> tuple[Any, Any]:
    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(name, []).append(Call(_copied(args), _copied(kwargs)))

    def end(_: nn.Module, args: Any, output: Any) -> None:
        calls[name][-1].output = _copied(output)

    before = module.register_forward_pre_hook(begin, with_kwargs=True)
    return before, module.register_forward_hook(end)


def agrees(module: nn.Module, calls: Seq[Call]) -> bool:
    """Whether a module answers each of these calls as the one that they were made to."""
    try:
        return all(is_close(call.repeat(module), call.output) for call in calls)
    except Exception:  # whatever it raises, it does not fit
        return False


@contextmanager
def finding_wrong(modules: Mapping[str, nn.Module], calls: Calls) -> Iterator[set[str]]:
    """Within, modules compute as ever, but hand on the answers that were noted, in the same order
    of calls: each is given what the untouched one was given, whatever others do wrong. Yields the
    names of those whose own answers differ, that change what they are given, or that raise.
    """
    wrong: set[str] = set()
    for name, module in modules.items():
        # On the instance, where it is found before the class's.
        module.__dict__["forward"] = _guarded(module.forward, name, calls[name], wrong)
    try:
        yield wrong
    finally:
        for module in modules.values():
            del module.__dict__["forward"]


def _guarded(forward: Any, name: str, calls: Seq[Call], wrong: set[str]) -> Any:
    remaining = iter(calls)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        call = next(remaining)
        given, noted = _tensors((args, kwargs)), _tensors((call.args, call.kwargs))
        if is_close(given, noted):  # else another has changed it, and that one is wrong
            try:
                is_right = is_close(forward(*args, **kwargs), call.output)
            except Exception:
                is_right = False
            if not is_right or not is_close(given, noted):
                wrong.add(name)
        return _copied(call.output)

    return guarded


def _tensors(value: Any) -> tuple[Tensor, ...]:
    """All tensors in it."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, dict):
        return _tensors(tuple(value.values()))
    if isinstance(value, list | tuple):
        return tuple(tensor for part in value for tensor in _tensors(part))
    return ()


def is_close(found: Any, expected: Any) -> bool:
    """Tensors (…, dim) of the same shape and type whose rows differ by rounding alone; tuples of
    such; else equal values.
    """
    if isinstance(expected, tuple):
        return (
            isinstance(found, tuple)
            and len(found) == len(expected)
            and all(map(is_close, found, expected))
        )
    if not isinstance(expected, Tensor):
        return bool(found == expected)
    if not isinstance(found, Tensor):
        return False
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if expected.dtype not in TOLERANCE:
        return torch.equal(found, expected)
    largest = expected.float().abs().amax(-1)
    difference = (found.float() - expected.float()).abs().amax(-1)
    return bool((difference <= TOLERANCE[expected.dtype] * largest).all())


def _copied(value: Any) -> Any:
    """Copies of all tensors in it; what else is in it stays the same object."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    return value
