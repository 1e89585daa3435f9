"""Errors that BFTrainer raises on purpose, all derived from `BFTrainerError`.

Each message reads: what is wrong, where, what to do. The command line prints it as one line and exits with `exit_code`.
"""


class BFTrainerError(Exception):
    """Base of all errors BFTrainer raises on purpose; the message is written for a person."""

    exit_code = 1


class InputError(BFTrainerError):
    """Raised when the call or its input is wrong; repeating it unchanged cannot help."""

    exit_code = 2
