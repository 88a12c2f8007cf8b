import sys

from hypothesis import settings

# The machine may be busy: how long an example takes says nothing.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# The test host runs kernels with ELF sections and glibc's contexts. A Mac has Metal itself, on which the kernels run in
# tests/routing/test_kernel.py and in benchmarks/routing_conformance.py --executors metal.
collect_ignore = [] if sys.platform == "linux" else ["host", "kernels"]
