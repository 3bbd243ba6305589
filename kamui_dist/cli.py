"""`kamui-dist COMMAND`: one thin entry.

A command is a file in commands/ with `add_arguments(parser)` and `run(args) -> int`; its docstring is its help.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

import kamui_dist
from kamui_dist.errors import EXIT_USER_ERROR, UserError

COMMANDS = {
    "tokenizer": "train a byte-level BPE tokenizer on text files",
    "prepare": "turn text files into token shards to train on",
    "sample": "generate text from a checkpoint",
    "submit": "check a run and submit it to a cluster",
    "status": "how a run is doing: step, loss, speed, time left, job",
    "check": "preflight: network, disk, clocks and strategies of all ranks",
    "diagnose": "what is wrong with a run, or with another trainer's log, and what to do",
    "report": "the summary of a run: outcome, cost, goodput, findings, next step",
    "inspect": "list, verify and pin checkpoints; print what an update trains on",
}
_EPILOG = """Train with   python -m kamui_dist.train CONFIG   (or torchrun ... -m kamui_dist.train CONFIG).
`kamui-dist COMMAND --help` explains a command."""


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Only the command that is asked for is imported, so that each answers fast."""
    parser = argparse.ArgumentParser(
        prog="kamui-dist",
        description="Tools around the trainer: data in, text out.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kamui-dist {kamui_dist.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    asked = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        child = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == asked:
            module = importlib.import_module(f"kamui_dist.commands.{name}")
            child.description = module.__doc__
            module.add_arguments(child)
            child.set_defaults(call=module.run)
    return parser


class _Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: as Ctrl-C, on the way out everything is cleaned up."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def _end_in_order() -> None:
    """From now on SIGTERM and SIGHUP end a command as Ctrl-C does: half-written files go, worker processes too. What is ignored
    (nohup) stays ignored."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _terminated)


def _terminated(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # sent to a whole group it may come several times: once is enough to clean up
    raise _Terminated(number)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. User errors are one line on stderr and code 2."""
    os.umask(os.umask(0o022) | 0o022)  # whatever a command makes, group and others cannot write
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(argv)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USER_ERROR
    try:
        _end_in_order()
        code = int(args.call(args))
        sys.stdout.flush()  # here, where a closed pipe is still caught
        return code
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return EXIT_USER_ERROR
    except _Terminated as error:
        print(f"ended by {error}", file=sys.stderr)
        return 128 + error.number
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
