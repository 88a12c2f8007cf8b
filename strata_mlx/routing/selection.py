"""``select``, through which every router goes: it checks the arguments, and an executor computes."""

import math
from typing import Any

import mlx.core as mx

from strata_mlx.errors import InputError
from strata_mlx.routing.additive import LogitRange, margins, select_additive, select_margin
from strata_mlx.routing.ops import Executor, Selection, select_ops
from strata_mlx.routing.policy import RoutingPolicy

__all__ = ["Executor", "LogitRange", "Selection", "select", "select_ops"]

ROUTERS = ("softmax", "sigmoid")
_LOGIT_TYPES = (mx.float32, mx.bfloat16, mx.float16)
_PLAIN = RoutingPolicy()


def select(
    logits: mx.array,
    resident: mx.array | None,
    policy: RoutingPolicy | None,
    *,
    top_k: int,
    draft_rows: mx.array | None = None,
    norm_topk: bool = True,
    router: str = "softmax",
    selection_bias: mx.array | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scale: float = 1.0,
    logit_range: LogitRange | None = None,
    confidence: mx.array | None = None,
    executor: Executor = select_ops,
    check: bool = False,
    layer: int | str | None = None,
) -> Selection:
    """Picks ``top_k`` experts for each row of a window, and the router's own weights over them.

    Nothing is evaluated here unless ``check`` is set. Without a policy that can fire, or without a residency
    map, the result is the plain router's, bit for bit.

    Args:
        logits: the router's output ``[T, E]``, float32, bfloat16 or float16; float32 inside.
        resident: bool ``[E]``, which experts are in memory; None where that is not known.
        policy: how residents are preferred; None for the plain router.
        draft_rows: bool ``[T]``; None says that row 0 is the head of the window and later rows are drafts.
        norm_topk: divide the weights by their sum, or by 2^-14 where that is larger (``norm_topk_prob``).
        router: "softmax", or "sigmoid" (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; GLM-4.x; MiMo).
        selection_bias: float ``[E]``, added to sigmoid scores for selection only.
        n_group, topk_group: selection is from the best ``topk_group`` of ``n_group`` equal groups of experts.
        scale: the model's own scaling factor, applied last.
        logit_range: what a cache_prior policy has seen before this window (``LogitRange``).
        confidence: float32 ``[T]``, how sure a draft head is of the token after each row, for a margin policy with a
            ``sure_margin``; None where no head has said anything.
        executor: what computes the selection, for policies of kind "moce"; the others take the op path.
        check: debug switch: evaluates, and raises where a row is all NaN.
        layer: names the layer in that error.

    Returns:
        ids ``[T, K]`` uint32 in the order of selection, and weights ``[T, K]`` float32.

    Raises:
        InputError: an argument that does not fit, or with ``check`` a row of NaN.
    """
    policy = policy or _PLAIN
    options: dict[str, Any] = {
        "top_k": top_k,
        "norm_topk": norm_topk,
        "router": router,
        "selection_bias": selection_bias,
        "n_group": n_group,
        "topk_group": topk_group,
        "scale": scale,
    }
    check_arguments(logits, resident, policy, draft_rows, confidence, **options)
    if check:
        _check_rows(logits, layer)
    if not policy.active:
        resident, policy = None, _PLAIN
    if policy.kind == "margin" and resident is not None:
        sure = confidence if policy.sure_margin is not None else None
        return select_margin(logits, resident, margins(policy), sure, protect=policy.protect, **options)[:2]
    if policy.kind != "moce" and resident is not None:
        return select_additive(logits, resident, policy, logit_range or LogitRange(), **options)
    if draft_rows is None:
        draft_rows = mx.arange(logits.shape[0]) > 0
    tables = (policy if resident is not None else _PLAIN).tables(top_k)
    return executor(logits, resident, tables, draft_rows, **options)


def check_arguments(
    logits: mx.array,
    resident: mx.array | None,
    policy: RoutingPolicy,
    draft_rows: mx.array | None,
    confidence: mx.array | None,
    *,
    top_k: int,
    norm_topk: bool,  # noqa: ARG001
    router: str,
    selection_bias: mx.array | None,
    n_group: int,
    topk_group: int,
    scale: float,
) -> None:
    """Raise InputError where ``select`` would, by what is known before anything is computed."""
    _check_arrays(logits, resident, draft_rows, selection_bias, router)
    _check_vector("confidence", confidence, logits.shape[0], (mx.float32,))
    _check_numbers(logits.shape[-1], top_k, router, n_group, topk_group, scale)
    policy.check_top_k(top_k)


def _check_arrays(
    logits: mx.array,
    resident: mx.array | None,
    draft_rows: mx.array | None,
    selection_bias: mx.array | None,
    router: str,
) -> None:
    if router not in ROUTERS:
        raise InputError(f"router is {router!r}, expected one of {', '.join(ROUTERS)}")
    if logits.ndim != 2 or logits.dtype not in _LOGIT_TYPES:
        raise InputError(f"router logits: expected floats [T, E], found {logits.dtype} {logits.shape}")
    rows, experts = logits.shape
    _check_vector("resident", resident, experts, (mx.bool_,))
    _check_vector("draft_rows", draft_rows, rows, (mx.bool_,))
    _check_vector("selection_bias", selection_bias, experts, _LOGIT_TYPES)
    if selection_bias is not None and router != "sigmoid":
        raise InputError("selection_bias is for sigmoid routers only")


def _check_vector(name: str, values: mx.array | None, size: int, types: tuple[mx.Dtype, ...]) -> None:
    if values is not None and (values.shape != (size,) or values.dtype not in types):
        expected = " or ".join(str(each).removeprefix("mlx.core.") for each in types)
        raise InputError(f"{name}: expected {expected} [{size}], found {values.dtype} {values.shape}")


def _check_numbers(experts: int, top_k: int, router: str, n_group: int, topk_group: int, scale: float) -> None:
    for name, value in {"top_k": top_k, "n_group": n_group, "topk_group": topk_group}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} is {value!r}, expected a whole number, at least 1")
    if n_group > 1 and router != "sigmoid":
        raise InputError("expert groups are for sigmoid routers only")
    if experts % n_group or topk_group > n_group:
        raise InputError(f"cannot keep {topk_group} of {n_group} equal groups of {experts} experts")
    if top_k > experts // n_group * topk_group:
        raise InputError(f"top_k is {top_k}, but the router chooses from {experts // n_group * topk_group} experts")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise InputError(f"scale is {scale!r}, expected a finite number")


def _check_rows(logits: mx.array, layer: int | str | None) -> None:
    empty = mx.isnan(logits).all(axis=-1)  # [T]
    if empty.any():
        where = "" if layer is None else f"layer {layer}, "
        raise InputError(f"router logits: {where}row {mx.argmax(empty).item()}: every value is NaN")
