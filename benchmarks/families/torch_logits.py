"""What transformers computes from checkpoints: run by an interpreter that has torch and transformers.

    TORCH_PYTHON benchmarks/families/torch_logits.py FOLDER

Every sub-folder of FOLDER is a checkpoint with an ``inputs.npz``: ``tokens`` ``[B, T]``, and for MTP layers ``next``
``[B, T]``, the tokens after them, and ``hidden`` ``[B, T, D]``. Its ``torch.npz`` gets ``logits`` ``[B, T, V]`` and,
where transformers has the MTP layers, ``mtp.N`` ``[B, T, D]``, the output of the N-th for the output of the one before.
FOLDER/torch.json gets the versions, and the families that this transformers does not have. Nothing of strata_mlx is
imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

try:
    from transformers.modeling_layers import MtpModel
except ImportError:  # of older versions, which have no MTP layers
    MtpModel = None

MTP_LAYERS = 8  # at most
_RENAMED = ("hybrid_layer_pattern", "moe_layer_freq", "layernorm_epsilon", "rope_theta", "swa_rope_theta")


def load(folder: Path) -> Any:
    """The model in float32; raises where a tensor is missing, or left over and not of an MTP layer."""
    config = AutoConfig.from_pretrained(folder)
    if config.model_type == "mimo_v2_flash":
        config = mimo_config(folder)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    layers = model.config.num_hidden_layers
    mtp = tuple(f"model.layers.{layers + i}." for i in range(MTP_LAYERS))
    unexpected = [name for name in info["unexpected_keys"] if not name.startswith(mtp)]
    wrong = {"missing": info["missing_keys"], "unexpected": unexpected, "mismatched": info["mismatched_keys"]}
    if any(wrong.values()):
        raise ValueError(f"{folder}: {wrong}")
    return model.eval()


def mimo_config(folder: Path) -> Any:
    """From the published names. ``sliding_window`` counts the query there and here; transformers' own reading of
    ``sliding_window_size`` has one token more.
    """
    published = json.loads((folder / "config.json").read_text())
    kinds = {"full_attention": "rope_theta", "sliding_attention": "swa_rope_theta"}
    rotary = {"rope_type": "default", "partial_rotary_factor": published["partial_rotary_factor"]}
    names = list(kinds)
    changed = {
        "layer_types": [names[kind] for kind in published["hybrid_layer_pattern"]],
        "mlp_layer_types": [("dense", "sparse")[kind] for kind in published["moe_layer_freq"]],
        "rms_norm_eps": published["layernorm_epsilon"],
        "rope_parameters": {kind: {**rotary, "rope_theta": published[theta]} for kind, theta in kinds.items()},
    }
    kept = {k: v for k, v in published.items() if k not in ("model_type", "sliding_window_size", *_RENAMED)}
    return AutoConfig.for_model("mimo_v2_flash", **kept, **changed)


def heads(model: Any, folder: Path, inputs: Any) -> dict[str, Any]:
    """Outputs of the MTP layers, where transformers has them for this family."""
    if MtpModel is None or not getattr(model.config, "num_mtp_layers", None):
        return {}
    # It finds MTP layers by what loading the trunk ignores: the numbers that published checkpoints have.
    layers = model.config.num_hidden_layers
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers + i}\." for i in range(MTP_LAYERS)]
    model.config.name_or_path = str(folder)
    mtp = MtpModel.from_pretrained(model).eval()
    hidden, tokens = torch.tensor(inputs["hidden"]), torch.tensor(inputs["next"])
    positions, result = torch.arange(tokens.shape[1])[None], {}
    for i in range(mtp.num_mtp_layers):
        hidden = mtp.forward_layer(i, hidden, positions, None, input_ids=tokens)
        result[f"mtp.{i}"] = hidden.numpy()
    return result


def main(folder: Path) -> None:
    missing = set()
    for checkpoint in sorted(file.parent for file in folder.glob("*/inputs.npz")):
        family = json.loads((checkpoint / "config.json").read_text())["model_type"]
        if family not in CONFIG_MAPPING:
            missing.add(family)
            continue
        model, inputs = load(checkpoint), np.load(checkpoint / "inputs.npz")
        with torch.inference_mode():
            logits = model(torch.tensor(inputs["tokens"])).logits.numpy()
            np.savez(checkpoint / "torch.npz", logits=logits, **heads(model, checkpoint, inputs))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    (folder / "torch.json").write_text(json.dumps({"versions": versions, "missing": sorted(missing)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
