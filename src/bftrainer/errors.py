"""The one family of errors BFTrainer raises on purpose.

Each message reads: what is wrong, where, what to do. The command line prints it as one line and exits with `exit_code`.
"""


class BFTrainerError(Exception):
    """Something BFTrainer set out to do failed; the message is for a person."""

    exit_code = 1


class InputError(BFTrainerError):
    """The call or its input is wrong; repeating it unchanged cannot help."""

    exit_code = 2
