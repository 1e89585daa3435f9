"""The `bftrainer` command combines the command groups and turns every error into one line and an exit status.

Exit status: 0 done, 1 failed, 2 the call or the input is wrong.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any

import typer

from bftrainer import __version__
from bftrainer.errors import BFTrainerError
from bftrainer.util.text import one_line

# Newer releases of typer bundle their own click, so its errors are looked up through typer.
_UsageError: Any = typer.BadParameter.__base__
_AnyCallError: Any = _UsageError.__base__

COMMANDS = {
    **{name: f"machine.{name}" for name in ("trace", "allocate", "simulate", "tune", "paper", "profile")},
    **{
        name: f"live.{name}"
        for name in ("demo", "serve", "agent", "submit", "status", "eta", "curves", "logs", "watch", "lend")
    },
    **dict.fromkeys(("nodes", "events"), "live.status"),
    **dict.fromkeys(("results", "best"), "live.results"),
    **dict.fromkeys(("cancel", "wait", "pause", "resume", "drain"), "live.control"),
    **{name: f"admin.{name}" for name in ("config", "token", "owner", "doctor", "backup", "prune", "slurm", "report")},
}
"""Modules of this package by command; each module adds its commands to an app with `register`."""


def build(first_word: str = "") -> typer.Typer:
    """Build the command line. A call that names a command loads that command only."""
    app = typer.Typer(
        name="bftrainer",
        help="Train neural networks on the nodes that a supercomputer's batch scheduler cannot fill.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in dict.fromkeys((COMMANDS[first_word],) if first_word in COMMANDS else COMMANDS.values()):
        importlib.import_module(f"bftrainer.cli.{name}").register(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bftrainer {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


def main() -> None:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:]))


def run(args: list[str]) -> int:
    """Run the command line with `args` and return the exit status."""
    try:
        status = build(args[0] if args else "")(args, prog_name="bftrainer", standalone_mode=False)
    except _UsageError as problem:
        if type(problem).__name__ == "NoArgsIsHelpError":
            print(problem.format_message(), file=sys.stderr)
            return 2
        where = problem.ctx.command_path if problem.ctx else "bftrainer"
        return _fail(f"{one_line(problem.format_message())} (see: {where} --help)", 2)
    except _AnyCallError as problem:
        return _fail(one_line(problem.format_message()), problem.exit_code)
    except BFTrainerError as problem:
        return _fail(one_line(str(problem)), problem.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # The reader of our output exited, as `head` does. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MemoryError:
        return _fail("out of memory", 1)
    except OSError as problem:
        where = f"{problem.filename}: " if problem.filename else ""
        return _fail(f"{where}{problem.strerror or problem}", 1)
    return status if isinstance(status, int) else 0


def _fail(message: str, status: int) -> int:
    print(f"bftrainer: {message}", file=sys.stderr)
    return status
