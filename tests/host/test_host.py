"""The test host itself: what it runs, what it refuses, and what it makes visible."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from strata_mlx.errors import Fault
from tests.host import compiler
from tests.host.compiler import KernelError
from tests.host.host import host_kernel, mutate

Triple = tuple[int, int, int]


def launch(
    body: str,
    *inputs: Any,
    grid: Triple | int = 64,
    threadgroup: Triple | int = 64,
    shape: Sequence[int] = (64,),
    dtype: Any = np.float32,
    name: str = "probe",
    header: str = "",
    **options: Any,
) -> Any:
    """Runs a body with inputs a, b, ... and one output ``out``."""
    kernel = host_kernel(name, [chr(97 + i) for i in range(len(inputs))], ["out"], body, header)
    (out,) = kernel(
        inputs=inputs,
        grid=(grid, 1, 1) if isinstance(grid, int) else grid,
        threadgroup=(threadgroup, 1, 1) if isinstance(threadgroup, int) else threadgroup,
        output_shapes=[shape],
        output_dtypes=[dtype],
        **options,
    )
    return out


REVERSE = """
threadgroup float shared[64];
uint i = thread_index_in_threadgroup;
shared[i] = a[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = shared[63 - i];
"""
NUMBERS = np.arange(64, dtype=np.float32)


@pytest.mark.parametrize("seed", range(8))
def test_a_barrier_makes_every_threads_writes_visible(seed: int) -> None:
    np.testing.assert_array_equal(launch(REVERSE, NUMBERS, seed=seed), NUMBERS[::-1])


def test_a_missing_barrier_shows_as_a_result_that_depends_on_the_seed() -> None:
    racy = mutate(REVERSE, "threadgroup_barrier(mem_flags::mem_threadgroup);", "")
    results = {launch(racy, NUMBERS, seed=seed).tobytes() for seed in range(4)}
    assert len(results) > 1


def test_a_simdgroup_that_shares_memory_needs_a_barrier_too() -> None:
    body = """
    threadgroup uint shared[32];
    uint lane = thread_index_in_simdgroup;
    shared[lane] = lane;
    out[lane] = shared[(lane + 1) % 32];
    """
    ordered = mutate(body, "    out[", "    simdgroup_barrier(mem_flags::mem_threadgroup);\n    out[")
    for seed in range(4):
        racing, right = (launch(text, seed=seed, grid=32, shape=(32,), dtype=np.uint32) for text in (body, ordered))
        np.testing.assert_array_equal(right, (np.arange(32) + 1) % 32)
        assert not np.array_equal(racing, right)


def test_threads_in_a_loop_of_barriers_stay_together() -> None:
    body = """
    threadgroup uint rank[96];
    uint i = thread_index_in_threadgroup;
    rank[i] = i;
    for (int step = 0; step < 10; step++) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      uint next = rank[(i + 1) % 96];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      rank[i] = next;
    }
    out[i] = rank[i];
    """
    for seed in range(3):
        ranks = launch(body, grid=96, threadgroup=96, shape=(96,), dtype=np.uint32, seed=seed)
        np.testing.assert_array_equal(ranks, (np.arange(96) + 10) % 96)


COLLECTIVES = """
uint lane = thread_index_in_simdgroup;
uint at = simdgroup_index_in_threadgroup * 32 + lane;
float x = a[at];
out[at * 8 + 0] = simd_sum(x);
out[at * 8 + 1] = simd_max(x);
out[at * 8 + 2] = simd_min(x);
out[at * 8 + 3] = simd_prefix_exclusive_sum(x);
out[at * 8 + 4] = simd_shuffle(x, (lane + 3) % 32);
out[at * 8 + 5] = simd_broadcast(x, 5);
out[at * 8 + 6] = simd_shuffle_xor(x, 1);
out[at * 8 + 7] = simd_shuffle_down(x, 1);
"""


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_collectives_work_on_their_own_simdgroup(seed: int) -> None:
    values = np.random.default_rng(0).integers(-99, 99, (2, 32)).astype(np.float32)
    got = launch(COLLECTIVES, values, shape=(2, 32, 8), seed=seed)
    lane = np.arange(32)
    for x, columns in zip(values, got.transpose(0, 2, 1), strict=True):
        expected = [
            np.full(32, x.sum()),
            np.full(32, x.max()),
            np.full(32, x.min()),
            np.cumsum(x) - x,
            x[(lane + 3) % 32],
            np.full(32, x[5]),
            x[lane ^ 1],
            x[np.minimum(lane + 1, 31)],
        ]
        np.testing.assert_array_equal(columns, np.stack(expected))


def test_collectives_take_in_the_lanes_that_are_left() -> None:
    # 70 threads: two whole simdgroups and one of 6 lanes, of which the first returns.
    body = """
    uint i = thread_index_in_threadgroup;
    if (i == 64) {
      return;
    }
    out[i] = simd_sum(1.0f);
    """
    for seed in range(4):
        sums = launch(body, grid=70, threadgroup=70, shape=(70,), init_value=0, seed=seed)
        np.testing.assert_array_equal(sums, [32] * 64 + [0] + [5] * 5)


def test_float_sums_do_not_depend_on_the_order_of_arrival() -> None:
    values = np.random.default_rng(1).normal(size=64).astype(np.float32)
    results = {
        launch("out[thread_index_in_threadgroup] = simd_sum(a[thread_index_in_threadgroup]);", values, seed=s).tobytes()
        for s in range(8)
    }
    assert len(results) == 1


@pytest.mark.parametrize(
    ("grid", "threadgroup"), [((70, 1, 1), (32, 1, 1)), ((5, 7, 3), (2, 4, 2)), ((3, 3, 1), (64, 64, 1))]
)
def test_every_thread_of_any_grid_runs_once(grid: Triple, threadgroup: Triple) -> None:
    body = """
    uint3 at = thread_position_in_grid;
    uint i = at.x + threads_per_grid.x * (at.y + threads_per_grid.y * at.z);
    out[i * 2] += 1;
    uint place = threadgroup_position_in_grid.x * 10 + thread_position_in_threadgroup.x;
    out[i * 2 + 1] = place * 10 + threads_per_threadgroup.x;
    """
    for seed in (0, 3):
        shape = (*grid[::-1], 2)
        got = launch(body, grid=grid, threadgroup=threadgroup, shape=shape, dtype=np.int32, init_value=0, seed=seed)
        assert (got[..., 0] == 1).all()
        x, size = np.arange(grid[0]), min(threadgroup[0], grid[0])
        expected = x // size * 100 + x % size * 10 + np.minimum(size, grid[0] - x // size * size)
        assert (got[..., 1] == expected).all()


def test_the_signature_is_mlxs() -> None:
    # Shapes, strides and ndim on demand; 0-dimensional inputs by reference; constants and types as given.
    body = """
    out[0] = a_shape[0]; out[1] = a_shape[1]; out[2] = a_strides[0]; out[3] = a_ndim;
    out[4] = b + N; out[5] = FLAG ? c[0] : 0; out[6] = sizeof(W);
    """
    template = [("N", 5), ("FLAG", True), ("W", mx.bfloat16)]
    inputs = (np.zeros((3, 4), np.uint8), np.int32(7), np.array([9], np.int64))
    got = launch(body, *inputs, grid=1, threadgroup=1, shape=(7,), dtype=np.int32, template=template)
    np.testing.assert_array_equal(got, [3, 4, 4, 2, 12, 9, 2])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint8, mx.int64, mx.bool_])
def test_mlx_arrays_go_in_and_out_in_every_type(dtype: mx.Dtype) -> None:
    values = mx.array([0.0, 1.0, 1.0, 0.0]).astype(dtype)
    body = "uint i = thread_position_in_grid.x; out[i] = float(a[i]) > 0 ? a[i] : a[3];"
    got = launch(body, values, grid=4, threadgroup=4, shape=(4,), dtype=dtype)
    assert got.dtype == dtype
    assert mx.array_equal(got, values)


def test_an_input_of_other_strides_arrives_row_by_row() -> None:
    a = mx.array(np.arange(64, dtype=np.float32).reshape(8, 8)).T
    mx.eval(a)
    out = launch("out[thread_position_in_grid.x] = a[thread_position_in_grid.x];", a)
    np.testing.assert_array_equal(out, np.array(a).reshape(-1))


def test_bfloat16_rounds_to_nearest_even_as_mlx_does() -> None:
    values = mx.array([*np.random.default_rng(2).normal(size=61).tolist(), float("nan"), float("inf"), 3.4e38])
    got = launch("uint i = thread_position_in_grid.x; out[i] = a[i];", values, dtype=mx.bfloat16)
    assert mx.array_equal(got, values.astype(mx.bfloat16), equal_nan=True)
    (bits,) = host_kernel("bits", ["a"], ["out"], "out[0] = a[0];")(
        inputs=[(np.array([0x3F80]), "bfloat16")],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=["bfloat16"],
    )
    assert bits.tolist() == [0x3F80]


# What goes wrong


def test_outputs_that_no_thread_writes_are_poisoned() -> None:
    assert np.isnan(launch("(void)out;")).all()
    assert (launch("(void)out;", dtype=np.uint32) == 0xA5A5A5A5).all()
    assert mx.isnan(launch("(void)out;", mx.zeros(1), dtype=mx.bfloat16)).all()


def test_threadgroup_memory_holds_nothing_from_before() -> None:
    body = """
    threadgroup uint shared[4];
    out[threadgroup_position_in_grid.x] = shared[0];
    shared[0] = 1;
    """
    seen = [launch(body, grid=4, threadgroup=1, shape=(4,), dtype=np.uint32, seed=seed) for seed in (0, 1)]
    assert (seen[0] == 0xA5A5A5A5).all()
    assert (seen[1] == 0xFFFFFFFF).all()


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            f"if (thread_index_in_threadgroup < 32) {{ {BARRIER} }}",
            "threads 0..31 wait at threadgroup_barrier (probe.metal:1), threads 32..63 have returned",
        ),
        (
            f"if (thread_index_in_threadgroup == 7) {{ return; }}\n{BARRIER}",
            "threads 0..6 wait at threadgroup_barrier (probe.metal:2), thread 7 has returned, threads 8..63",
        ),
        (
            f"if (thread_index_in_threadgroup < 32) {{\n{BARRIER}\n}} else {{\n{BARRIER}\n}}",
            "at different barriers",
        ),
        (f"if (thread_index_in_threadgroup % 32 < 9) {{ simd_sum(1); }}\n{BARRIER}", "never come"),
        (
            "if (thread_index_in_threadgroup % 32 < 9) {\nsimd_sum(1);\n} else {\nsimd_sum(1);\n}",
            "at different places",
        ),
        (
            "if (thread_index_in_threadgroup % 2) {\nsimd_sum(1);\n} else {\nsimd_max(1);\n}",
            "at different places",
        ),
        (
            "if (thread_index_in_threadgroup > 40) { return; }\nsimd_broadcast(1, 20);",
            "a lane that takes no part",
        ),
    ],
)
def test_divergence_is_an_error_that_says_who_waits_where(body: str, message: str) -> None:
    for seed in (0, 5):
        with pytest.raises(KernelError) as failure:
            launch(body + "\n(void)out;", seed=seed)
        assert "kernel probe, threadgroup (0, 0, 0)" in str(failure.value)
        if seed == 0 or "never come" not in message:
            assert message in str(failure.value)
        np.testing.assert_array_equal(launch(REVERSE, NUMBERS), NUMBERS[::-1])  # the host is as good as new


@pytest.mark.parametrize(("index", "where"), [("64", "after"), ("-1", "before")])
def test_a_write_outside_an_output_is_caught_by_the_guards(index: str, where: str) -> None:
    with pytest.raises(KernelError, match=f"kernel probe: wrote {where} the bounds of out"):
        launch(f"out[{index}] = 0;", grid=1, threadgroup=1)


def test_a_wild_access_is_an_error_and_not_the_end_of_the_process() -> None:
    with pytest.raises(KernelError, match=r"kernel probe, .*: thread 3 touched memory that is not there"):
        launch("if (thread_index_in_threadgroup == 3) { out[size_t(1) << 44] = 0; }")
    endless = """
    float deeper(int i) {
      volatile float x[64] = {};
      return i < 0 ? 0 : deeper(i + 1) + x[i % 64];
    }
    """
    with pytest.raises(KernelError, match="touched memory that is not there"):
        launch("out[0] = deeper(0);", header=endless)
    with pytest.raises(KernelError, match="not its to write"):
        launch("const_cast<float*>(a)[0] = out[0];", NUMBERS)
    np.testing.assert_array_equal(launch(REVERSE, NUMBERS), NUMBERS[::-1])


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        ("out[0] = a[64 + thread_index_in_threadgroup];", "heap-buffer-overflow"),
        (
            "threadgroup float s[4]; s[thread_index_in_threadgroup] = 1; out[0] = s[0];",
            "out of bounds|overflow",
        ),
        (
            "int x = 0x7fffffff; x += thread_index_in_threadgroup + 1 > 0; x += int(a[1]); out[0] = x;",
            "signed integer overflow",
        ),
    ],
)
def test_the_sanitised_build_reports_what_guards_cannot_see(body: str, finding: str) -> None:
    with pytest.raises(KernelError, match=finding):
        launch(body, NUMBERS, sanitize=True)


def test_the_sanitised_build_gives_the_same_results() -> None:
    np.testing.assert_array_equal(launch(REVERSE, NUMBERS, sanitize=True, seed=3), NUMBERS[::-1])
    with pytest.raises(KernelError, match=r"threads 0\.\.31 wait at threadgroup_barrier"):
        launch(f"if (thread_index_in_threadgroup < 32) {{ {BARRIER} }} (void)out;", sanitize=True)


def test_a_compile_error_names_the_kernels_own_line() -> None:
    with pytest.raises(KernelError, match=r"kernel typo does not compile:\n(.*\n)*typo\.metal:2:.*undeclared_name"):
        launch("uint i = 0;\nout[i] = undeclared_name;", name="typo")


@pytest.mark.parametrize("declaration", ["threadgroup float* p = shared;", "device float* p = out;"])
def test_text_that_only_metal_would_take_is_refused(declaration: str) -> None:
    with pytest.raises(KernelError, match="the address space of a pointer"):
        launch(f"threadgroup float shared[4]; {declaration}")


def test_a_wrong_number_of_arrays_is_refused() -> None:
    kernel = host_kernel("one", ["a"], ["out"], "")
    with pytest.raises(KernelError, match="takes 1 inputs and 1 outputs, got 0 inputs"):
        kernel(inputs=[], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], output_dtypes=[np.float32])


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    compiler.compiler.cache_clear()
    try:
        with pytest.raises(Fault, match=r"found none: install g\+\+"):
            launch("out[0] = 1;", name="nowhere")
    finally:
        compiler.compiler.cache_clear()


def test_a_mutation_must_find_its_text_once() -> None:
    assert mutate("a + b", "+", "-") == "a - b"
    for text, old, new in [("a", "+", "-"), ("a + b + c", "+", "-"), ("a + b", "+", "+")]:
        with pytest.raises(ValueError, match="expected exactly one"):
            mutate(text, old, new)
