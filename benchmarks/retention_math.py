"""The published illustration of the retention gates, and the ceiling that they are measured against.

    python benchmarks/retention_math.py --json

All 1,000 triples of confidences from the grid 0.1..1.0. A draft is accepted with its confidence; windows of 1 to 4 rows
cost 1, 1.02, 1.25 and 1.60, drafting 0.15. ``retained`` is the mean over the triples, ``tokens_per_cost`` all expected
tokens over all cost. No policy that sees these confidences can pass the last row: it is the rule of
strata_mlx.speculation.economics at the rate that it earns itself. The row before judges each round by its own rate.
"""

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import parser, table
from strata_mlx.speculation.economics import best_k, best_rate, expected_tokens, round_costs
from strata_mlx.speculation.retention import RetentionPolicy

GRID = [tenths / 10 for tenths in range(1, 11)]
VERIFY_COSTS, DRAFT_COST = [1, 1.02, 1.25, 1.60], 0.15
SCHEDULE = (0.10, 0.35, 0.55)
POLICIES = {
    "flat 0.35": RetentionPolicy(0.35),
    "schedule 0.10,0.35,0.55": RetentionPolicy(schedule=SCHEDULE),
    "cumulative 0.25": RetentionPolicy(min_cum_p=0.25),
    "schedule 0.10,0.35,0.55 and cumulative 0.20": RetentionPolicy(schedule=SCHEDULE, min_cum_p=0.20),
}
PUBLISHED = [("1.533", "1.322892"), ("2.050", "1.325972"), ("1.512", "1.370152"), ("1.657", "1.376354")]


def rows() -> list[dict[str, Any]]:
    """One row for each policy, with ``published``: whether its digits are those of the specification."""
    triples = np.array(list(product(GRID, repeat=3)))  # [1000, 3]
    model = (triples, VERIFY_COSTS, DRAFT_COST)
    retained = {name: np.array([policy.retain(t) for t in triples]) for name, policy in POLICIES.items()}
    retained["rule, by each round's own rate"] = best_k(*model)
    retained["rule, by the best rate (ceiling)"] = best_k(*model, rate=best_rate(*model))
    result = [{"policy": name, **outcome(triples, k)} for name, k in retained.items()]
    for row, digits in zip(result, PUBLISHED, strict=False):
        row["published"] = (f"{row['retained']:.3f}", f"{row['tokens_per_cost']:.6f}") == digits
    return result


def outcome(triples: NDArray[np.float64], k: NDArray[np.int64]) -> dict[str, Any]:
    """Of retaining ``k`` ``[N]`` drafts of triples ``[N, 3]``."""
    tokens = np.take_along_axis(expected_tokens(triples), k[:, None], axis=1)
    cost = round_costs(VERIFY_COSTS, DRAFT_COST)[k]
    return {"retained": float(k.mean()), "tokens_per_cost": float(tokens.sum() / cost.sum())}


def main(argv: list[str] | None = None) -> int:
    """Prints the table; the exit code is 1 where a row differs from the specification."""
    args = parser(__doc__).parse_args(argv)
    result = rows()
    if args.json:
        print(json.dumps({"triples": len(GRID) ** 3, "rows": result}, indent=2))
    else:
        shown = [{**r, "retained": f"{r['retained']:.3f}", "rate": f"{r['tokens_per_cost']:.6f}"} for r in result]
        print(table(shown, ["policy", "retained", "rate", "published"]))
    return 0 if all(row.get("published", True) for row in result) else 1


if __name__ == "__main__":
    raise SystemExit(main())
