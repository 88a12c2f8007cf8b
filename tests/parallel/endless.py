"""What each rank of a test does that is to be killed: decode without end, and say once that it does."""

from __future__ import annotations

import sys
from pathlib import Path

from strata_mlx import expert_parallel, load, stream_generate

with expert_parallel(timeout=float(sys.argv[2])) as ranks:
    model, tokenizer = load(Path(sys.argv[1]), slots=4, ranks=ranks)
    tokenizer.eos_token_ids.clear()
    for count, _ in enumerate(stream_generate(model, tokenizer, "a", -1, mtp=False)):
        if count == 3:
            print("running", flush=True)
