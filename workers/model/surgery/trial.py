"""Records the calls of modules and compares other modules against them.

The calls come from real forwards, with the shapes and arguments that the model uses.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Largest difference of an element as a share of its row's largest.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


@dataclass(slots=True)
class Call:
    """One call of a module. Its tensors are copies: a model may modify them in place."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None

    def repeat(self, module: nn.Module) -> Any:
        """Calls another module with the same arguments. Raises what it raises."""
        return module(*_copied(self.args), **_copied(self.kwargs))


Calls = dict[str, list[Call]]  # by the module's name


@contextmanager
def noting_calls(decoder: nn.Module, names: Iterable[str]) -> Iterator[Calls]:
    """Records all calls of these modules. A module without calls has no entry."""
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
    """Whether a module gives the recorded results."""
    try:
        return all(is_close(call.repeat(module), call.output) for call in calls)
    except Exception:  # whatever it raises, it does not fit
        return False


def is_close(found: Any, expected: Any) -> bool:
    """Whether tensors (…, dim), or tuples of them, agree in shape and type and differ only by
    rounding; other values must be equal."""
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
    """Copies all tensors in a value; other objects stay the same."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    return value
