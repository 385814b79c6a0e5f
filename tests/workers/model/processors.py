"""The instruction sets to which tests limit this machine: all that it has."""

from workers.model.matmul_choice import Processor, Product, find_processor
from workers.model.native.library import supported_isas

_widest = find_processor().isa
# This machine's, up to the limit of this run (BATCHWAY_CPU_ISA).
ISAS = supported_isas()[: supported_isas().index(_widest) + 1]

PROCESSORS = {
    **{f"own products, {isa}": Processor(isa, frozenset({Product.OWN})) for isa in ISAS},
    "oneDNN": Processor(_widest, frozenset({Product.ONEDNN})),
    "plain torch": Processor(_widest, frozenset()),
}
