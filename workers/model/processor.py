"""The CPU features that the engine may use; tests and operators can narrow them. No other module
checks the processor."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from workers.engine.model import ModelRefused
from workers.model.native.library import Isa

ISA_VARIABLE = "BATCHWAY_CPU_ISA"


class Product(StrEnum):
    """Implementations of a linear layer's product."""

    OWN = "own"  # our kernels in workers/model/native
    ONEDNN = "onednn"  # torch's prepacked product
    TORCH = "torch"  # torch's default product


@dataclass(frozen=True, slots=True)
class Processor:
    """`isa`: the widest instruction set for our kernels. `products`: the candidates; TORCH is
    always one."""

    isa: Isa = Isa.NATIVE
    products: frozenset[Product] = frozenset(Product)


def find_processor(environment: Mapping[str, str] = os.environ) -> Processor:
    """The current processor, narrowed by BATCHWAY_CPU_ISA. Raises ModelRefused."""
    name = environment.get(ISA_VARIABLE) or Isa.NATIVE
    if name not in list(Isa):
        raise ModelRefused(f"{ISA_VARIABLE}={name} is not one of {', '.join(Isa)}")
    return Processor(Isa(name))
