import sys

from hypothesis import settings

# The machine may be busy: how long an example takes says nothing.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# The test host runs kernels with ELF sections and glibc's contexts. A Mac has Metal itself: tests/routing/test_kernel.py
# takes the kernels there, and so does benchmarks/routing_conformance.py --executors metal.
collect_ignore = [] if sys.platform == "linux" else ["host", "kernels"]
