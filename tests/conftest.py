import signal
import sys
from collections.abc import Callable

import pytest
from hypothesis import settings

Report = Callable[[str, str | None], None]

# The machine may be busy: how long an example takes says nothing.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# A job in the background of a shell ignores Ctrl-C, and so would the commands that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The test host runs kernels with ELF sections and glibc's contexts. A Mac has Metal itself, on which the kernels run in
# tests/routing/test_kernel.py and in benchmarks/routing_conformance.py --executors metal.
collect_ignore = [] if sys.platform == "linux" else ["host", "kernels"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists the mutants that the tests killed, and what killed each; a mutant that lives is a failed test."""
    kills = [
        (report.nodeid.rpartition("[")[2].rstrip("]"), dict(report.user_properties)["killed_by"])
        for report in terminalreporter.getreports("passed")
        if "killed_by" in dict(report.user_properties)
    ]
    if kills:
        terminalreporter.section(f"{len(kills)} mutants killed")
        for name, killer in sorted(kills):
            terminalreporter.write_line(f"{name}: {killer}")


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Report:
    """How the tests with mutants say what killed each."""

    def say(name: str, killer: str | None) -> None:
        record_property("killed_by", killer)
        print(f"mutant {name}: killed by {killer}")
        assert killer is not None

    return say
