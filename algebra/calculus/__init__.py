"""Differentiation: `vjp` of values, and of whole graphs their gradient, JVP, Jacobian and Hessian."""

from __future__ import annotations

from .derivatives import gradient, hessian, jacobian, jvp
from .vjp import vjp

__all__ = ["gradient", "hessian", "jacobian", "jvp", "vjp"]
