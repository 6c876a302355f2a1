"""The four losses and two optimizers of onnxruntime-training, against what its version 1.19.2 computed on a model that both accept.

Its wheel needs numpy below 2, so the numbers stand here. They come from `artifacts.generate_artifacts` for `y = x w + b` with `requires_grad` of both
parameters, four steps of `Module` and `Optimizer` on one batch, learning rate 0.05: the losses before each step, and w and b after the last.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from pullback.algebra import primitives as p
from pullback.algebra.dims import dim
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Constant, Graph, building
from pullback.algebra.training.step import training_step
from pullback.algebra.types import f32, tensor

W = (np.arange(12).reshape(3, 4) % 5 / 4 - 0.5).astype(np.float32)
B = np.array([0.1, -0.2, 0.3, 0.0], np.float32)
X = ((np.arange(15).reshape(5, 3) * 7 % 11) / 5 - 1).astype(np.float32)
NUMBERS = ((np.arange(20).reshape(5, 4) * 3 % 7) / 3 - 1).astype(np.float32)
TARGETS = {
    "mse_loss": NUMBERS,
    "l1_loss": NUMBERS,
    "cross_entropy": np.array([0, 3, 1, 2, 3]),
    "binary_cross_entropy_with_logits": (np.arange(20).reshape(5, 4) * 5 % 3 % 2).astype(np.float32),
}

# (loss, optimizer): losses, w, b
RECORDED = {
    ("mse_loss", "adamw"): (
        [0.9293612, 0.8075687, 0.70496, 0.620798],
        [
            -0.3009912,
            -0.0547604,
            -0.1969136,
            0.055747,
            0.3014647,
            -0.3015829,
            -0.0515093,
            -0.1873916,
            0.4491116,
            0.3017565,
            -0.3014926,
            -0.1100677,
        ],
        [0.2856212, -0.0043017, 0.11009, -0.194173],
    ),
    ("mse_loss", "sgd"): (
        [0.9293612, 0.8975252, 0.8674793, 0.8391074],
        [
            -0.4304975,
            -0.2193757,
            -0.0468147,
            0.222345,
            0.4832944,
            -0.4950824,
            -0.2447522,
            -0.0013912,
            0.2658719,
            0.4324706,
            -0.4356946,
            -0.2394144,
        ],
        [0.1156453, -0.1496487, 0.2681195, -0.0424942],
    ),
    ("l1_loss", "adamw"): (
        [0.7933334, 0.7333555, 0.6873535, 0.6509398],
        [
            -0.300034,
            -0.1422062,
            -0.1873111,
            0.0504395,
            0.3002201,
            -0.3072366,
            -0.1791031,
            -8e-06,
            0.4499118,
            0.3031328,
            -0.3047264,
            -0.0504395,
        ],
        [0.2999118, -0.0126889, 0.1922062, -0.1999705],
    ),
    ("l1_loss", "sgd"): (
        [0.7933334, 0.7855734, 0.7778133, 0.7700534],
        [-0.474, -0.24, -0.03, 0.248, 0.4960001, -0.492, -0.25, -0.0, 0.26, 0.462, -0.47, -0.248],
        [0.11, -0.17, 0.29, -0.03],
    ),
    ("cross_entropy", "adamw"): (
        [1.3239844, 1.2551023, 1.1909811, 1.1316344],
        [
            -0.6994932,
            -0.0509765,
            -0.1894856,
            0.4483159,
            0.6992704,
            -0.3003516,
            -0.4499401,
            -0.1983826,
            0.0527304,
            0.3005194,
            -0.6887419,
            -0.0501208,
        ],
        [0.0732063, -0.0077937, 0.1025264, 0.1977877],
    ),
    ("cross_entropy", "sgd"): (
        [1.3239844, 1.3138287, 1.30383, 1.2939854],
        [
            -0.5403991,
            -0.2277847,
            -0.0091166,
            0.2773005,
            0.5128989,
            -0.4965994,
            -0.2586332,
            -0.0076663,
            0.2439649,
            0.4657694,
            -0.5012929,
            -0.2084414,
        ],
        [0.0990392, -0.1917304, 0.2674488, 0.0252425],
    ),
    ("binary_cross_entropy_with_logits", "adamw"): (
        [0.6953807, 0.6740112, 0.654143, 0.6356692],
        [
            -0.3019556,
            -0.0509201,
            -0.199485,
            0.0570757,
            0.3020093,
            -0.6961679,
            -0.052422,
            3.25e-05,
            0.0570762,
            0.6995794,
            -0.6581113,
            -0.0570758,
        ],
        [-0.0997696, -0.1201358, 0.1009693, -0.1989681],
    ),
    ("binary_cross_entropy_with_logits", "sgd"): (
        [0.6953807, 0.6941399, 0.6929064, 0.6916801],
        [
            -0.4963673,
            -0.2416784,
            -0.0157438,
            0.2464481,
            0.499231,
            -0.5012087,
            -0.2483692,
            -0.0,
            0.2487998,
            0.5071392,
            -0.5002258,
            -0.2464481,
        ],
        [0.0871643, -0.1994274, 0.2893036, -0.0171221],
    ),
}


def linear() -> Graph:
    n = dim("N")
    with building():
        x, w, b = (
            p.input("x", tensor(f32, (n, 3))),
            p.input("w", tensor(f32, (3, 4)), "parameter"),
            p.input("b", tensor(f32, (4,)), "parameter"),
        )
        y = p.add(p.dot(x, w, contract=((1,), (0,))), p.broadcast(b, shape=(n, 4), axes=(1,)))
        return Graph((x, w, b), {"y": y}, data={"w": Constant(W), "b": Constant(B)})


@pytest.mark.parametrize(("loss", "optimizer"), RECORDED)
def test_four_steps_give_the_numbers_of_onnxruntime_training(loss: str, optimizer: str) -> None:
    """Its AdamW adds epsilon before the bias correction (`adam_mode=1`), so that what stands beside the corrected root is `epsilon / sqrt(1 - beta2 ** t)`."""
    options = {"weight_decay": 0.0} if optimizer == "adamw" else {}
    step = training_step(linear(), loss=loss, optimizer=optimizer, lr=0.05, optimizer_options=options)
    state: dict[str, np.ndarray] = {}
    losses = []
    for t in range(1, 5):
        eps = {"eps": 1e-6 / math.sqrt(1 - 0.999**t)} if optimizer == "adamw" else {}
        out = evaluate(step.graph, {"x": X, "target": TARGETS[loss], **state, **eps})
        losses.append(float(out["loss"]))
        state = {name.removeprefix("new_"): v for name, v in out.items() if name.startswith("new_")}
    for found, expected in zip((losses, state["w"].ravel(), state["b"]), RECORDED[loss, optimizer], strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)  # Adam divides gradients near 0 by their own size
