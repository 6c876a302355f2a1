"""Pullback: any ONNX inference model in, one explicit ONNX training step out."""
