"""What the engine may use of a CPU. Tests and operators narrow it.

Nothing else in the engine asks which processor this is.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from workers.engine.model import ModelRefused
from workers.model.native.library import Isa

ISA_VARIABLE = "BATCHWAY_CPU_ISA"


class Product(StrEnum):
    """Who multiplies by the weights of a linear layer."""

    OWN = "own"  # the kernels of workers/model/native
    ONEDNN = "onednn"  # torch's prepacked product
    TORCH = "torch"  # as torch multiplies by default


@dataclass(frozen=True, slots=True)
class Processor:
    """`isa`: the widest instructions of our kernels. `products`: those to choose from; TORCH always
    remains.
    """

    isa: Isa = Isa.NATIVE
    products: frozenset[Product] = frozenset(Product)


def find_processor(environment: Mapping[str, str] = os.environ) -> Processor:
    """The processor at hand, narrowed as BATCHWAY_CPU_ISA says. Raises ModelRefused."""
    name = environment.get(ISA_VARIABLE) or Isa.NATIVE
    if name not in list(Isa):
        raise ModelRefused(f"{ISA_VARIABLE}={name} is not one of {', '.join(Isa)}")
    return Processor(Isa(name))
