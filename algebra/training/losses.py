"""The table of losses, by their names in `torch.nn.functional` and by shorter aliases."""

from __future__ import annotations

from ..errors import Refusal
from .classification_losses import (
    CLASSIFICATION,
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cross_entropy,
    dice_loss,
    multi_margin_loss,
    multilabel_margin_loss,
    multilabel_soft_margin_loss,
    nll_loss,
    sigmoid_focal_loss,
    soft_margin_loss,
    softmax_focal_loss,
)
from .ctc import CTC, ctc_loss, ctc_loss_with_logits
from .distance_losses import (
    DISTANCE,
    cosine_embedding_loss,
    hinge_embedding_loss,
    margin_ranking_loss,
    pairwise_distance,
    triplet_margin_loss,
    triplet_margin_with_distance_loss,
)
from .loss import Loss, near
from .regression_losses import (
    REGRESSION,
    gaussian_nll_loss,
    huber_loss,
    kl_div,
    l1_loss,
    mse_loss,
    poisson_nll_loss,
    rmse_loss,
    smooth_l1_loss,
)

__all__ = [
    "LOSSES",
    "Loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "ctc_loss_with_logits",
    "dice_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "pairwise_distance",
    "poisson_nll_loss",
    "rmse_loss",
    "sigmoid_focal_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softmax_focal_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
]

RECORDS: tuple[Loss, ...] = (*CLASSIFICATION, *REGRESSION, *DISTANCE, *CTC)

LOSSES: dict[str, Loss] = {name: record for record in RECORDS for name in (record.name, *record.aliases)}


def loss(name: str) -> Loss:
    """The loss of this name or alias.

    >>> loss("mse").name
    'mse_loss'
    """
    if name not in LOSSES:
        raise Refusal(f"no loss {name!r}", [near(name, LOSSES)])
    return LOSSES[name]
