"""The table of optimizers, by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..errors import Refusal
from .adaptive import LAMB, Adadelta, Adafactor, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, SparseAdam
from .loss import near
from .momentum import ASGD, LARS, SGD, Lion, Muon, Rprop
from .optimizer import Optimizer, Slot, compute_dtype, ema

__all__ = [
    "ASGD", "LAMB", "LARS", "OPTIMIZERS", "SGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Lion", "Muon", "NAdam",
    "Optimizer", "RAdam", "RMSprop", "Rprop", "Slot", "SparseAdam", "compute_dtype", "ema", "optimizer",
]  # fmt: skip

OPTIMIZERS: dict[str, type[Optimizer]] = {
    cls.name: cls
    for cls in (
        SGD, Adam, AdamW, Adamax, NAdam, RAdam, Adagrad, Adadelta, RMSprop, Rprop, ASGD, Adafactor, Muon, SparseAdam, Lion, LAMB, LARS,
    )
}  # fmt: skip


def optimizer(name: str, **options: Any) -> Optimizer:
    """The optimizer of this name with these options, named as in `torch.optim`.

    >>> optimizer("sgd", lr=0.1, momentum=0.9).hyperparameters()
    {'lr': 0.1, 'momentum': 0.9}
    """
    wanted = name.lower()
    if wanted not in OPTIMIZERS:
        raise Refusal(f"no optimizer {name!r}", [near(wanted, OPTIMIZERS)])
    cls = OPTIMIZERS[wanted]
    known = [f.name for f in fields(cls)]
    unknown = [f"no option {o!r}; {near(o, known)}" for o in options if o not in known]
    if unknown:
        raise Refusal(f"cannot use the optimizer {name}", unknown)
    return cls(**options)
