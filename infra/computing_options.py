"""Options for kernels and step execution.

Code that has never run on a GPU is off by default, and its help says so.
"""

import argparse

_ATTENTIONS = ("auto", "torch", "triton", "fa3", "flashinfer")
_STEPS = ("direct", "ahead", "graphs")
_QUANTIZATIONS = ("none", "int8")


def add_quantization_option(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--quantization",
        choices=_QUANTIZATIONS,
        default="none",
        help="int8: weights of linear layers take a byte each; answers may differ (default: none)",
    )


def add_computing_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--attention",
        choices=_ATTENTIONS,
        default="auto",
        help="auto: the kernel for the processor, or torch; for NVIDIA GPUs, unmeasured: triton, "
        "kernels of our own; fa3 and flashinfer, of libraries (default: auto)",
    )
    group.add_argument(
        "--steps",
        choices=_STEPS,
        default="direct",
        help="direct: one after the other; ahead: the device computes the next one while the host "
        "books the last; graphs: ahead, as CUDA graphs; both unmeasured (default: direct)",
    )
    group.add_argument(
        "--torch-only",
        action="store_true",
        help="no merged modules, and on a CPU no kernels of batchway's own; slower "
        "(default: both, where they prove equal)",
    )
