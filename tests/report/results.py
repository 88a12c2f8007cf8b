"""Results as strata_mlx tune has them, made up, for reports without a run."""

from __future__ import annotations

from typing import Any

KINDS = ("plain", "flat", "schedule", "cumulative", "composed", "economic", "default", "oracle")


def results(streams: bool = False, evaluation: bool = False, pays: bool = True) -> dict[str, Any]:
    rows = [_row(kind, 1 + place / 10, streams) for place, kind in enumerate(KINDS)]
    slots = 32 if streams else None
    return {
        "model": "a <model> & more",
        "data": ["notes", "a very/long/path/to/some/folder/with/texts/that/does/not/fit/on/a/phone.jsonl"],
        "measured_on": {
            "machine": "machine-with-a-long-name-x86_64-2-cores",
            "device": "cpu",
            "dtype": "float32",
            "model": {"name": "qwen3_next", "sha256": "ab" * 32},
            "versions": {"mlx": "0.32.4", "mlx-lm": "0.32.2"},
        },
        "streams": streams,
        "slots_of_model": slots,
        "version": "0",
        "experts": 128,
        "storage": "2 GB/s" if streams else None,
        "eviction": "lrfu" if streams else None,
        "fit": {"documents": 2, "positions": 2000},
        "held_out": {"documents": 2, "positions": 2001},
        "chosen": {**rows[5], "pays": pays},
        "recommendation": "Use the economic policy." if pays else "Nothing beats plain decoding here.",
        "output": "policy.json",
        "rows": rows,
        "costs": {
            "plain": 5.0,
            "verify": [6.0 + i for i in range(8)],
            "draft": [1.0 + i for i in range(7)],
            "miss": 0.1,
            "error": 0.05,
        },
        "calibration": [*(_reliability(position) for position in range(7)), _reliability("all")],
        "evaluation": _evaluation() if evaluation else None,
        "seconds": 321.0,
    }


def _row(kind: str, speedup: float, streams: bool) -> dict[str, Any]:
    return {
        "kind": kind,
        "policy": f"{kind} 0.1,0.35,0.55 and more, up to 7 drafts, stepwise",
        "steps": 7,
        "drafting": "stepwise",
        "tokens_per_s": 100 * speedup,
        "tokens_per_s_interval": [95 * speedup, 105 * speedup],
        "speedup": speedup,
        "speedup_interval": [0.9 * speedup, 1.1 * speedup],
        "tokens_per_round": 2.0,
        "drafted_per_token": 1.0,
        "retained_per_token": 1.0,
        "accepted_share": None if kind == "plain" else 0.8,
        "misses_per_token": 3.0 * streams,
        "ms_per_token": {"draft": 2.0, "verify": 8.0, "reading": 3.0 * streams},
    }


def _reliability(position: int | str) -> dict[str, Any]:
    bins = [{"trials": 50, "predicted": p, "observed": p**0.5} for p in (0.2, 0.6, 0.95)]
    return {
        "position": position,
        "trials": 150,
        "accepted": 0.7,
        "confidence": 0.6,
        "calibrated": 0.7,
        "ece_raw": 0.1,
        "ece_fitted": 0.02,
        "brier_raw": 0.2,
        "brier_fitted": 0.1,
        "bins_raw": bins,
        "bins_fitted": bins,
    }


def _evaluation() -> dict[str, Any]:
    names = {"exact": 0.5, "moce bonus 0.4": 0.4, "moce bonus 0.85": 0.3, "margin 0.02": 0.35}
    rows = [
        {
            "name": name,
            "slots": slots,
            "documents": 4,
            "tokens": 380,
            "perplexity": 8.0,
            "price": 0.5 - misses,
            "price_interval": [0.4 - misses, 0.6 - misses],
            "agreement": 0.9,
            "kl": 0.01,
            "misses": misses,
        }
        for slots in (32, 64)
        for name, misses in names.items()
    ]
    return {"experts": 128, "slots_of_model": None, "rows": rows}
