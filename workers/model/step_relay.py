"""Hands the step to attention modules whose layers do not pass keyword arguments on.

Only StableLM and Nemotron are known to need it: all others take the step as an argument all the
way. What is remembered lives in this model's relay, for the length of one forward.
"""

from typing import Any

from torch import nn

from workers.model.attention.interface import STEP_KEYWORD, AttentionStep


def relay_step(decoder: nn.Module) -> None:
    """Installs hooks that bring the forward's step to every attention module of the decoder."""
    relay = _StepRelay()
    decoder.register_forward_pre_hook(relay.take, with_kwargs=True)
    decoder.register_forward_hook(relay.forget, always_call=True)
    for module in decoder.modules():
        if type(module).__name__.endswith("Attention"):
            module.register_forward_pre_hook(relay.give, with_kwargs=True)


class _StepRelay:
    def __init__(self) -> None:
        self._step: AttentionStep | None = None

    def take(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._step = kwargs.get(STEP_KEYWORD)

    def give(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        if self._step is None:
            return None
        return args, kwargs | {STEP_KEYWORD: self._step}

    def forget(self, module: nn.Module, args: Any, output: Any) -> None:
        self._step = None
