"""A character-level GPT, from an ONNX inference model with random weights to a model of a text, on onnxruntime alone.

The text is the source of the time zone database (2025b), which says of itself that it is in the public domain.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
from pullback.algebra.training.step import training_step
from pullback.backends.runtime import Trainer
from pullback.frontends.onnx_import import load

TEXT = Path(__file__).parent / "data" / "tzdata.zi"
WIDTH, HEADS, LAYERS, CONTEXT = 48, 4, 2, 48

HEAD = """
<ir_version: 10, opset_import: ["" : 17]>
gpt (int64[batch, time] ids) => (float[batch, time, {vocabulary}] logits) {{
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  two = Constant <value_ints = [2]> ()
  split = Constant <value_ints = [0, 0, {heads}, {head}]> ()
  merge = Constant <value_ints = [0, 0, {width}]> ()
  shape = Shape (ids)
  time = Slice (shape, one, two, zero)
  time0 = Squeeze (time)
  i0 = Constant <value_int = 0> ()
  i1 = Constant <value_int = 1> ()
  place = Range (i0, time0, i1)
  row = Unsqueeze (place, one)
  past = LessOrEqual (place, row)
  minus = Constant <value_float = -1e9> ()
  scale = Constant <value_float = {scale}> ()
  tokens = Gather (wte, ids)
  places = Gather (wpe, place)
  h0 = Add (tokens, places)
"""
LAYER = """
  n{i} = LayerNormalization <axis = -1> (h{i}, ln{i}_g, ln{i}_b)
  qkv{i} = MatMul (n{i}, qkv{i}_w)
  q{i}, k{i}, v{i} = Split <axis = 2> (qkv{i})
  qs{i} = Reshape (q{i}, split)
  ks{i} = Reshape (k{i}, split)
  vs{i} = Reshape (v{i}, split)
  qt{i} = Transpose <perm = [0, 2, 1, 3]> (qs{i})
  kt{i} = Transpose <perm = [0, 2, 3, 1]> (ks{i})
  vt{i} = Transpose <perm = [0, 2, 1, 3]> (vs{i})
  s{i} = MatMul (qt{i}, kt{i})
  ss{i} = Mul (s{i}, scale)
  sm{i} = Where (past, ss{i}, minus)
  a{i} = Softmax <axis = -1> (sm{i})
  o{i} = MatMul (a{i}, vt{i})
  ot{i} = Transpose <perm = [0, 2, 1, 3]> (o{i})
  om{i} = Reshape (ot{i}, merge)
  p{i} = MatMul (om{i}, proj{i}_w)
  r{i} = Add (h{i}, p{i})
  m{i} = LayerNormalization <axis = -1> (r{i}, ln{i}_g2, ln{i}_b2)
  f{i} = MatMul (m{i}, fc{i}_w)
  fb{i} = Add (f{i}, fc{i}_b)
  g{i} = Relu (fb{i})
  d{i} = MatMul (g{i}, out{i}_w)
  h{j} = Add (r{i}, d{i})
"""
TAIL = """
  final = LayerNormalization <axis = -1> (h{layers}, ln_g, ln_b)
  back = Transpose <perm = [1, 0]> (wte)
  logits = MatMul (final, back)
}}
"""


def gpt(vocabulary: int) -> onnx.ModelProto:
    """A decoder with tied embeddings and random weights; batch and time are symbolic."""
    head = WIDTH // HEADS
    text = HEAD.format(vocabulary=vocabulary, heads=HEADS, head=head, width=WIDTH, scale=1 / math.sqrt(head))
    text += "".join(LAYER.format(i=i, j=i + 1) for i in range(LAYERS)) + TAIL.format(layers=LAYERS)
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "wte": (vocabulary, WIDTH),
        "wpe": (CONTEXT, WIDTH),
        "ln_g": (WIDTH,),
        "ln_b": (WIDTH,),
    }
    for i in range(LAYERS):
        shapes |= {f"ln{i}_{k}": (WIDTH,) for k in ("g", "b", "g2", "b2")}
        shapes |= {f"qkv{i}_w": (WIDTH, 3 * WIDTH), f"proj{i}_w": (WIDTH, WIDTH), f"fc{i}_w": (WIDTH, 4 * WIDTH)}
        shapes |= {f"fc{i}_b": (4 * WIDTH,), f"out{i}_w": (4 * WIDTH, WIDTH)}
    for name, shape in shapes.items():
        spread = 0.02 if name in ("wte", "wpe") else 1 / math.sqrt(shape[0])
        value = rng.standard_normal(shape) * spread if len(shape) > 1 else np.full(shape, float("_g" in name))
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    return model


def windows(codes: np.ndarray, step: int) -> dict[str, np.ndarray]:
    """Pieces of a text, and the same one character later."""
    starts = np.arange(0, len(codes) - CONTEXT - 1, step)
    at = starts[:, None] + np.arange(CONTEXT)
    return {"ids": codes[at], "target": codes[at + 1]}


def merged(pieces: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {k: np.concatenate([piece[k] for piece in pieces]) for k in pieces[0]}


def test_a_character_model_learns_a_text(tmp_path: Path) -> None:
    text = np.frombuffer(TEXT.read_bytes(), np.uint8)
    letters, codes = np.unique(text, return_inverse=True)
    blocks = np.array_split(codes, 200)
    data = merged([windows(b, 16) for i, b in enumerate(blocks) if i % 10])
    held_out = merged([windows(b, CONTEXT) for b in blocks[::10]])
    model = gpt(len(letters))
    step = training_step(
        load(model), optimizer="adamw", lr=4e-3, class_axis=-1, clip_global_norm=1.0, no_decay=True,
        schedule=("constant", {"warmup_steps": 30}),
    )  # fmt: skip
    assert "wte" in step.signature.parameters  # tied: one parameter, one gradient
    trainer = Trainer(step, threads=1)
    history = trainer.fit(data, epochs=1, batch_size=16, validation=held_out, metrics=["accuracy"], progress=False)
    assert history.losses[0] > 3.5
    assert np.mean(history.losses[-20:]) < 1.6
    assert history.epochs[-1]["val_loss"] < 1.6
    trainer.export(tmp_path / "trained.onnx")
    (logits,) = ort.InferenceSession(tmp_path / "trained.onnx").run(None, {"ids": held_out["ids"][:4]})
    right = np.mean(logits.argmax(-1) == held_out["target"][:4])
    assert right > 0.4
