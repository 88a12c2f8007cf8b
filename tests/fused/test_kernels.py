"""The fused kernels on the test host, against float64 NumPy and against themselves with one row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from strata_mlx.fused.attention import Heads, attend, attention_heads
from strata_mlx.fused.experts import Experts, Passing, experts_apart, experts_down, experts_mix, experts_up
from strata_mlx.fused.matrix import Matrix, Norm
from strata_mlx.fused.project import project
from strata_mlx.fused.recurrence import Recurrence, gated_delta
from strata_mlx.fused.tokens import embed, likeliest
from tests.fused import reference
from tests.fused.reference import wide
from tests.host.host import HostBuild

BUILD = HostBuild()
DTYPES = (mx.float32, mx.bfloat16)
ROWS = (1, 3, 4, 9)


def random(seed: int, *shape: int, dtype: mx.Dtype = mx.float32, scale: float = 1.0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(scale=scale, size=shape).astype(np.float32)).astype(dtype)


def matrix(seed: int, *shape: int, bits: int = 4, group: int = 32, dtype: mx.Dtype = mx.float32) -> Matrix:
    weights = random(seed, *shape, dtype=dtype, scale=shape[-1] ** -0.5)
    if not bits:
        return Matrix(weights, weights, weights)
    return Matrix(*mx.quantize(weights, group_size=group, bits=bits), bits, group)


def close(got: mx.array, expected: Any, dtype: mx.Dtype) -> None:
    """Within float32 rounding, or that of the result's type."""
    expected = np.asarray(expected)
    error = np.abs(wide(got).reshape(expected.shape) - expected)
    tolerance = 2e-6 if dtype == mx.float32 else 2.0**-8
    assert (error <= tolerance * (1 + np.abs(expected))).all(), error.max()


def same_rows(whole: mx.array, single: list[mx.array]) -> None:
    """A window's rows are those of single steps, to the bit."""
    assert mx.array_equal(whole, mx.concatenate(single, axis=1)).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_project(rows: int, dtype: mx.Dtype) -> None:
    x, residual = random(0, 1, rows, 64, dtype=dtype), random(1, 1, rows, 42, dtype=dtype)
    matrices = [matrix(2, 24, 64, bits=8, dtype=dtype), matrix(3, 1, 64, bits=0, dtype=dtype), matrix(4, 17, 64)]
    norm = random(5, 64, dtype=dtype)
    y = project(x, matrices, norm=Norm(norm, 1e-6), residual=residual, build=BUILD)
    normed = reference.rms_norm(wide(x), wide(norm), 1e-6)
    expected = np.concatenate([normed @ reference.dense(m).T for m in matrices], axis=-1) + wide(residual)
    close(y, expected, dtype)
    alone = [
        project(x[:, t : t + 1], matrices, norm=Norm(norm, 1e-6), residual=residual[:, t : t + 1], build=BUILD)
        for t in range(rows)
    ]
    same_rows(y, alone)


@pytest.mark.parametrize("bits", [0, 2, 4, 8])
def test_project_of_one_matrix_without_norm(bits: int) -> None:
    x, w = random(0, 2, 1, 128), matrix(1, 10, 128, bits=bits, group=64)
    close(project(x, [w], build=BUILD), wide(x) @ reference.dense(w).T, mx.float32)


@pytest.mark.parametrize("bits", [0, 2, 4, 8])
def test_columns_of_a_matrix(bits: int) -> None:
    whole = matrix(0, 10, 192, bits=bits, group=64)
    some = whole.columns(64, 192)
    np.testing.assert_array_equal(reference.dense(some), reference.dense(whole)[:, 64:])
    assert bits or some.scales is some.weight is some.biases
    x = random(1, 1, 2, 128)
    close(project(x, [some], build=BUILD), wide(x) @ reference.dense(whole)[:, 64:].T, mx.float32)


@pytest.mark.parametrize("outputs", [2048, 8192])
def test_project_of_many_outputs(outputs: int) -> None:
    x, w = random(0, 1, 2, 32), matrix(1, outputs, 32)
    close(project(x, [w], dtype=mx.float32, build=BUILD), wide(x) @ reference.dense(w).T, mx.float32)


def experts(dtype: mx.Dtype) -> Experts:
    return Experts(*(matrix(i, 6, *shape, dtype=dtype) for i, shape in enumerate([(32, 64), (32, 64), (64, 32)])))


def shared_expert(dtype: mx.Dtype) -> Experts:
    shapes = [(96, 64), (96, 64), (64, 96)]
    return Experts(*(matrix(i, *shape, bits=8, dtype=dtype) for i, shape in enumerate(shapes, 3)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("beside", "gated"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("rows", [1, 3])
def test_experts(rows: int, beside: bool, gated: bool, dtype: mx.Dtype) -> None:
    layer, shared = experts(dtype), shared_expert(dtype) if beside else None
    x, norm = random(0, 1, rows, 64, dtype=dtype), random(1, 64, dtype=dtype)
    rng = np.random.default_rng(2)
    ids = mx.array(np.stack([rng.permutation(6)[:3] for _ in range(rows)])[None].astype(np.uint32))
    weights, logits = random(3, 1, rows, 3), random(4, 1, rows, 7)

    def up(x: mx.array, ids: mx.array, layer: Experts, shared: Experts | None = None) -> mx.array:
        return experts_up(x, ids, layer, shared, norm=Norm(norm, 1e-6), build=BUILD)[0]

    def run(rows: slice) -> tuple[mx.array, mx.array]:
        values = up(x[:, rows], ids[:, rows], layer, shared)
        passing = Passing(x[:, rows], shared, logits[:, rows], gated)
        return values, experts_down(values, ids[:, rows], weights[:, rows], layer, passing, BUILD)

    values, y = run(slice(0, rows))
    normed = reference.rms_norm(wide(x), wide(norm), 1e-6)[0]
    gate, up_, down = (reference.dense(m) for m in (layer.gate, layer.up, layer.down))
    expected_values, expected = [], wide(x)[0].copy()
    for t in range(rows):
        row = []
        made = np.split(wide(values)[0, t], [32, 64, 96])
        for rank, expert in enumerate(np.array(ids)[0, t]):
            row.append(reference.silu(gate[expert] @ normed[t]) * (up_[expert] @ normed[t]))
            expected[t] += wide(weights)[0, t, rank] * (down[expert] @ made[rank])
        if shared:
            sgate, sup, sdown = (reference.dense(m) for m in (shared.gate, shared.up, shared.down))
            row.append(reference.silu(sgate @ normed[t]) * (sup @ normed[t]))
            expected[t] += (reference.sigmoid(wide(logits)[0, t, -1]) if gated else 1) * (sdown @ made[-1])
        expected_values.append(np.concatenate(row))
    close(values, np.stack(expected_values), dtype)
    close(y, expected, dtype)
    for whole, single in zip((values, y), zip(*(run(slice(t, t + 1)) for t in range(rows)), strict=True), strict=True):
        same_rows(whole, list(single))

    # Pair by pair, in another order, and mixed in the end.
    order = rng.permutation(rows * 3)
    tokens, chosen = mx.array(order // 3), ids.reshape(-1)[mx.array(order)][None, :, None]
    alone = experts_apart(up(x[:, tokens], chosen, layer), chosen, layer, BUILD)
    pairs = alone[0, mx.array(np.argsort(order)), 0].reshape(1, rows, 3, 64)
    zeros = mx.zeros((1, rows, 1), mx.uint32)
    shared_values = up(x, zeros, shared.stacked) if shared else None
    assert mx.array_equal(
        experts_mix(pairs, weights, shared_values, Passing(x, shared, logits, gated), BUILD), y
    ).item()


def recurrence(interleaved: bool, dtype: mx.Dtype) -> Recurrence:
    hk, hv, dk, dv = 2, 4, 32, 32
    conv = random(0, 2 * hk * dk + hv * dv, 4, 1, dtype=dtype, scale=0.5)
    a_log, dt_bias, norm = random(1, hv), random(2, hv, dtype=dtype), random(3, dv, dtype=dtype)
    return Recurrence(conv, a_log, dt_bias, norm, 1e-6, hk, hv, dk, dv, interleaved)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("tokens", ROWS)
def test_gated_delta(tokens: int, interleaved: bool, dtype: mx.Dtype) -> None:
    layer, sequences, channels = recurrence(interleaved, dtype), 2, 256
    projected = random(4, sequences, tokens, channels + 128 + 8, dtype=dtype)
    tail, state = random(5, sequences, 3, channels, dtype=dtype), random(6, sequences, 4, 32, 32)
    y, new_tail, new_state = gated_delta(projected, tail, state, layer, build=BUILD)
    for i in range(sequences):
        expected = reference.gated_delta(wide(projected)[i], wide(tail)[i], wide(state)[i], layer)
        for got, want in zip((y[i], new_tail[i], new_state[i]), expected, strict=True):
            close(got, want, dtype if got.dtype == dtype else mx.float32)
    stepped = []
    for t in range(tokens):
        step, tail, state = gated_delta(projected[:, t : t + 1], tail, state, layer, build=BUILD)
        stepped.append(step)
    same_rows(y, stepped)
    assert mx.array_equal(tail, new_tail).item()
    assert mx.array_equal(state, new_state).item()


HEADS = Heads(random(0, 64), random(1, 64), mx.array([1.0, 0.3, 0.1, 0.01]), 1e-6, 0.125, 4, 2, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("offset", "tokens"), [(0, 1), (7, 3), (250, 8), (255, 1), (256, 2), (700, 4)])
def test_attention(offset: int, tokens: int, dtype: mx.Dtype) -> None:
    layer = replace(HEADS, q_norm=HEADS.q_norm.astype(dtype), k_norm=HEADS.k_norm.astype(dtype))
    projected, at = random(2, 1, tokens, 2 * 4 * 64 + 2 * 2 * 64, dtype=dtype), mx.array([offset], mx.int32)
    queries, keys, values = attention_heads(projected, at, layer, build=BUILD)
    q, gate, k, v = reference.attention_heads(wide(projected)[0], offset, layer)
    for got, want in ((queries, q), (keys, k), (values, v)):
        close(got[0], want.swapaxes(0, 1), dtype)
    room = -(-(offset + tokens) // 256) * 256
    before = [random(seed, 1, 2, offset, 64, dtype=dtype) for seed in (3, 4)]
    behind = mx.full((1, 2, room - offset - tokens, 64), float("nan"), dtype)  # not looked at
    cached = [mx.concatenate([x, y, behind], axis=2) for x, y in zip(before, (keys, values), strict=True)]
    y = attend(queries, cached[0], cached[1], at, projected, layer, build=BUILD)
    expected = reference.attend(
        wide(queries)[0].swapaxes(0, 1), wide(cached[0])[0], wide(cached[1])[0], gate, offset, layer.scale
    )
    close(y[0], expected, dtype)
    alone = []
    for t in range(tokens):
        row, place = projected[:, t : t + 1], mx.array([offset + t], mx.int32)
        query = attention_heads(row, place, layer, build=BUILD)[0]
        least = -(-(offset + t + 1) // 256) * 256  # the cache may have been shorter then
        shorter = [x[:, :, :least] for x in cached]
        alone.append(attend(query, shorter[0], shorter[1], place, row, layer, build=BUILD))
    same_rows(y, alone)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_embed(bits: int) -> None:
    table, tokens = matrix(0, 11, 128, bits=bits, group=64, dtype=mx.bfloat16), mx.array([[10, 0, 3, 3]])
    close(embed(tokens, table, build=BUILD), reference.dense(table)[np.array(tokens)], mx.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_likeliest(dtype: mx.Dtype) -> None:
    logits = random(0, 3, 1500, dtype=dtype, scale=3)
    logits[1, 700], logits[1, 70] = 99, 99
    logits[2] = -mx.inf
    logits[2, 1499] = -5
    token, probability = likeliest(logits, build=BUILD)
    rows = wide(logits)
    assert np.array(token).tolist() == rows.argmax(-1).tolist()
    weights = np.exp(rows - rows.max(-1, keepdims=True))
    np.testing.assert_allclose(np.array(probability), 1 / weights.sum(-1), rtol=1e-6)
