"""Windows of a few rows on a GPU, in few launches: whole layers out of the kernels in ``kernels/``.

A small forward is bound by launches and host work, not by arithmetic. So each part of a layer is one kernel, and what a
kernel gives for a row of a window are the bits that it gives for that row in a plain step.
"""
