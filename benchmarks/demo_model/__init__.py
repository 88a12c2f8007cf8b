"""Make the demo model again: corpus, tokenizer, training and export, as ``python -m benchmarks.demo_model``.

The model is a 36-million-parameter mixture of experts for Python source (Qwen3-Next architecture with one MTP
layer). ``config`` and ``data`` and ``layout`` run without PyTorch; ``layers``, ``moe``, ``model``, ``train``,
``export``, ``evaluate`` and ``check`` need it. Nothing in ``strata_mlx`` imports this package.
"""
