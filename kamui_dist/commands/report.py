"""The summary of a run: how it ended, what it cost and where the time went, what was found, what to do next.

kamui-dist report runs/demo
kamui-dist report runs/demo --markdown       for an issue
kamui-dist diagnose runs/demo --html FILE    the same as a page, with all curves
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kamui_dist.report import summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--markdown", action="store_true", help="as a table in Markdown")


def run(args: argparse.Namespace) -> int:
    """Raises UserError if there is no such run."""
    print(summary.markdown(args.run) if args.markdown else summary.text(args.run))
    return 0
