"""Pullback: any ONNX inference model in, one explicit ONNX training step out.

graph = pullback.load("model.onnx")
step = pullback.training_step(graph, loss="cross_entropy", optimizer="adamw", lr=1e-3)
step.save("train.onnx")
"""

from .algebra.errors import DimError, InconclusiveDim, PullbackError, Refusal, TypeMismatch
from .algebra.signature import Signature
from .backends.runtime import Trainer
from .face import Model, Step, gradient, hessian, jacobian, jvp, load, lower, training_step
from .frontends.onnx_import import lowers

__all__ = [
    "DimError",
    "InconclusiveDim",
    "Model",
    "PullbackError",
    "Refusal",
    "Signature",
    "Step",
    "Trainer",
    "TypeMismatch",
    "gradient",
    "hessian",
    "jacobian",
    "jvp",
    "load",
    "lower",
    "lowers",
    "training_step",
]
