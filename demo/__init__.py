"""The model and data of `pullback demo`: 8x8 handwritten digits.

`digits.npz` holds 1,797 grey images of 8x8 pixels and their labels: the test part of "Optical Recognition of Handwritten Digits"
(E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, doi 10.24432/C50P49, CC BY 4.0), as scikit-learn ships it, split into 1,437 to
learn from and 360 to test with. `digits.onnx` is a small convolutional classifier with random weights and a symbolic batch: an inference model.
`python -m pullback.demo.make` writes both anew.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["DATA", "MODEL"]

MODEL = Path(__file__).with_name("digits.onnx")
DATA = Path(__file__).with_name("digits.npz")
