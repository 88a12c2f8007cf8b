"""Windows of a few rows on a GPU, in few launches: whole layers out of the kernels in ``kernels/``.

A small forward is bound by launches and host work, not by arithmetic. So each part of a layer is one kernel, and what a
window gives for a row are the bits that a plain step gives for it.
"""
