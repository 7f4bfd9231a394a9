"""A generation bundle made by hand: a model of two blocks whose next token is a function of all that it has seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, parser

from modify.export.bundle import (
    MANIFEST,
    GenerationManifest,
    GraphSpec,
    RoutedBlock,
    StateSpec,
    copy_companions,
    write_manifest,
)
from modify.export.json_values import CHECKSUM, checksum_of

VOCABULARY, TURNED_AWAY, EOS = 11, 10, 7
RAN_SHARE = 0.5  # of the slots of block 1

# Block 0 caches every token. Block 1 runs even tokens, caches those, and turns TURNED_AWAY away. Fill-up tokens leave
# nothing behind; where there is nothing else, logits are not-a-number. `table` lies in weights.data, and maps each
# token to itself.
TEXT = """
<ir_version: 10, opset_import: ["": 20]>
agraph (
  int64[{B},{S}] input_ids, int64[{B}] count, int64[{B}] seen, int64[{B},1] ran, int64[{B},1] overflow,
  float[{B},1,{T0},1] keys_0, float[{B},1,{T0},1] values_0, float[{B},1,{T1},1] keys_1, float[{B},1,{T1},1] values_1
) => (
  float[{B},1,{V}] logits, int64[{B}] seen_next, int64[{B},1] ran_next, int64[{B},1] overflow_next,
  float[{B},1,{T0},1] keys_0_next, float[{B},1,{T0},1] values_0_next, float[{B},1,{T1},1] keys_1_next,
  float[{B},1,{T1},1] values_1_next
)
<int64[1] one = {{1}}, int64[1] two = {{2}}, int64 zero0 = {{0}}, int64 one0 = {{1}}, int64 two0 = {{2}},
 int64[2] flat = {{{B}, -1}}, int64[2] around = {{1, 3}}, int64[1] away = {{{AWAY}}}, float[1] three = {{3}},
 float[1] size = {{{V}}}, float[1] zero_f = {{0}}>
{{
  chunk0 = Shape(input_ids)
  chunk = Gather(chunk0, one0)
  index = Range(zero0, chunk, one0)
  count1 = Unsqueeze(count, one)
  real = Less(index, count1)
  seen1 = Unsqueeze(seen, one)
  positions = Add(seen1, index)
  tokens = Gather(table, input_ids)

  remainder = Mod(input_ids, two)
  even = Less(remainder, one)
  is_away0 = Equal(input_ids, away)
  is_away = And(is_away0, real)
  stays = Not(is_away)
  selected0 = And(even, real)
  selected = And(selected0, stays)
  selected_i = Cast<to: int = 7>(selected)
  rank0 = CumSum(selected_i, one0)
  rank = Add(rank0, ran)
  slot1 = Sub(rank, one)
  ran_new = ReduceSum<keepdims: int = 1>(selected_i, one)
  ran_next = Add(ran, ran_new)
  away_i = Cast<to: int = 7>(is_away)
  away_new = ReduceSum<keepdims: int = 1>(away_i, one)
  overflow_next = Add(overflow, away_new)
  seen_next = Add(seen, count)

  {WRITE0}
  {WRITE1}

  f_slots0 = Reshape(keys_0_next, flat)
  v_slots0 = Reshape(values_0_next, flat)
  n0 = Shape(f_slots0)
  t0 = Gather(n0, one0)
  ar0 = Range(zero0, t0, one0)
  ar1 = Add(ar0, one)
  weight = Cast<to: int = 1>(ar1)
  weighted = Mul(f_slots0, weight)
  sum0 = ReduceSum<keepdims: int = 1>(weighted, one)
  f_slots1 = Reshape(keys_1_next, flat)
  sum1 = ReduceSum<keepdims: int = 1>(f_slots1, one)
  triple = Mul(sum1, three)
  total = Add(sum0, triple)
  next = Mod<fmod: int = 1>(total, size)
  off = Sub(table, next)
  square = Mul(off, off)
  neg = Neg(square)
  is_there = Greater(count1, zero0)
  none = Div(zero_f, zero_f)
  scores = Where(is_there, neg, none)
  logits = Unsqueeze(scores, one)
}}
"""

# A token's row of `hit` marks its slot; a slot that is hit takes the token, the others stay as they are.
WRITE = """
  shape{i} = Shape(keys_{i})
  slots{i} = Gather(shape{i}, two0)
  range{i} = Range(zero0, slots{i}, one0)
  where{i} = Unsqueeze({places}, two)
  same{i} = Equal(where{i}, range{i})
  may{i} = Unsqueeze({mask}, two)
  hit{i} = And(same{i}, may{i})
  hit_f{i} = Cast<to: int = 1>(hit{i})
  column{i} = Unsqueeze(tokens, two)
  put{i} = Mul(hit_f{i}, column{i})
  new{i} = ReduceSum<keepdims: int = 0>(put{i}, one)
  any_f{i} = ReduceMax<keepdims: int = 0>(hit_f{i}, one)
  any0{i} = Cast<to: int = 9>(any_f{i})
  any{i} = Unsqueeze(any0{i}, around)
  new4{i} = Unsqueeze(new{i}, around)
  keys_{i}_next = Where(any{i}, new4{i}, keys_{i})
  values_{i}_next = Where(any{i}, new4{i}, values_{i})
"""


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The next tokens by the model's definition, without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        every = sum(place * token for place, token in enumerate(tokens, 1))
        ran = sum(token for token in tokens if token % 2 == 0 and token != TURNED_AWAY)
        tokens.append((every + 3 * ran) % VOCABULARY)
    return tokens[len(prompt) :]


def rewrite_manifest(bundle: Path, **changes: Any) -> None:
    """Change fields of a bundle's manifest, as if it had been exported so."""
    path = bundle / MANIFEST
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(values | {CHECKSUM: checksum_of(values)}))


def write_bundle(
    folder: Path,
    *,
    batch: int = 3,
    length: int = 600,
    chunks: Sequence[int] = (256,),
    fixed: bool = False,
    config: dict[str, Any] | None = None,
    companions: Path | None = None,
) -> Path:
    """Write the bundle.

    Args:
        folder: to make.
        batch: of the graphs.
        length: of a sequence.
        chunks: of the prefill graphs.
        fixed: the caches are of a fixed size.
        config: more of the generation config.
        companions: folder with a tokenizer to copy.
    """
    folder.mkdir()
    if companions is not None:
        copy_companions(companions, folder)
    tokens = {0: length, 1: int(length * RAN_SHARE)}
    slots = {i: most + 1 for i, most in tokens.items()}
    graphs = []
    for chunk in (*chunks, 1):
        graphs.append(
            GraphSpec(file=f"chunk{chunk}.onnx", role="decode" if chunk == 1 else "prefill", chunk=chunk)
        )
        sizes = {f"T{i}": size if fixed else f"slots_{i}" for i, size in slots.items()}
        text = TEXT.format(
            B=batch,
            S=chunk,
            V=VOCABULARY,
            AWAY=TURNED_AWAY,
            WRITE0=WRITE.format(i=0, places="positions", mask="real"),
            WRITE1=WRITE.format(i=1, places="slot1", mask="selected"),
            **sizes,
        )
        model = parser.parse_model(text)
        table = model.graph.initializer.add()
        table.name, table.data_type, table.data_location = "table", TensorProto.FLOAT, TensorProto.EXTERNAL
        table.dims.append(VOCABULARY)
        for key, value in (("location", "weights.data"), ("offset", "0"), ("length", str(4 * VOCABULARY))):
            entry = table.external_data.add()
            entry.key, entry.value = key, value
        onnx.save(model, folder / f"chunk{chunk}.onnx")
    (folder / "weights.data").write_bytes(np.arange(VOCABULARY, dtype=np.float32).tobytes())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS} | (config or {})))
    states = [
        StateSpec(input=name, output=f"{name}_next", shape=shape, dtype="int64", grows=None, holds=None)
        for name, shape in (("seen", (batch,)), ("ran", (batch, 1)), ("overflow", (batch, 1)))
    ]
    states += [
        StateSpec(
            input=f"{kind}_{i}",
            output=f"{kind}_{i}_next",
            shape=(batch, 1, size, 1),
            dtype="float32",
            grows=2,
            holds="ran" if i else "all",
        )
        for i, size in slots.items()
        for kind in ("keys", "values")
    ]
    manifest = GenerationManifest(
        kind="generation",
        target="onnx",
        batch=batch,
        length=length,
        vocabulary=VOCABULARY,
        routing="predictor",
        graphs=tuple(graphs),
        states=tuple(states),
        limit_rows=False,
        routed_blocks=(RoutedBlock(block=1, capacity=RAN_SHARE, tokens=tokens[1]),),
        parity=(),
        opset=20,
        tensorrt_obstacles=() if fixed else ("its caches grow with the sequences",),
        versions={"modify": "0"},
        files={},
    )
    write_manifest(folder, manifest)
    return folder
