"""Errors that the user can fix: printed as one message without a traceback, exit status 2."""


class UserError(Exception):
    """The caller's mistake. The message names the file, line or key, the value, the limit and the remedy."""


class ConfigError(UserError):
    """A configuration that cannot be used; the message lists every problem that was found."""


class DataError(UserError):
    """A data file that cannot be used; the message names the file and the line or row."""


class TrainingStopped(RuntimeError):
    """A run that cannot go on (loss 0 or NaN, no labels, ...). Exit status 1: the checkpoint before it is kept."""


def first_line(error: BaseException) -> str:
    """Return what an exception of a library says, in one short line."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
    if any("weights_only" in line for line in lines):
        # torch advises to load it nevertheless, which runs whatever is in it.
        return "it is no file of weights alone, and what else is in it could be code; ask its author for safetensors"
    # pydantic and others name what is wrong in a line of its own below the title.
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return text[:300]
