"""The errors that strata-mlx raises on purpose. Each message says what is wrong, where, and what to do."""

import textwrap


class StrataError(Exception):
    """Base of every deliberate error. ``exit_code`` is what the command line ends with."""

    exit_code = 1


class Fault(StrataError):
    """Something outside failed: disk, network, memory. Trying again may work."""


class InputError(StrataError, ValueError):
    """What the caller handed over cannot be used: an option, a prompt, a file. The caller can fix it."""

    exit_code = 2


class CheckpointError(InputError):
    """A checkpoint (config, index, shard, tensor) is broken, incomplete or of an unsupported kind."""


class ModelNotFoundError(InputError):
    """No model was found under the given name."""


def in_one_line(error: Exception) -> str:
    """What another library has to say, shortened, for the message of an error of ours."""
    return textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
