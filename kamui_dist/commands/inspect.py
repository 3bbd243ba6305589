"""Look into a run: its checkpoints, and the data it reads.

kamui-dist inspect checkpoints RUN [--verify]     what is there, and whether it is whole
kamui-dist inspect pin RUN STEP                   keep one whatever checkpoint.keep says (unpin: no longer)
kamui-dist inspect data CONFIG --step S           windows, files, documents and text of one update
"""

from __future__ import annotations

import argparse

from kamui_dist.commands import inspect_checkpoints, inspect_data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)

    checkpoints = what.add_parser("checkpoints", help="list a run's checkpoints")
    inspect_checkpoints.add_checkpoints_arguments(checkpoints)
    checkpoints.set_defaults(inspect=inspect_checkpoints.run_checkpoints)

    pin = what.add_parser("pin", help="keep a checkpoint for ever")
    inspect_checkpoints.add_pin_arguments(pin)
    pin.set_defaults(inspect=inspect_checkpoints.run_pin)

    unpin = what.add_parser("unpin", help="take a pin off")
    inspect_checkpoints.add_pin_arguments(unpin)
    unpin.set_defaults(inspect=inspect_checkpoints.run_unpin)

    data = what.add_parser(
        "data", help="what one update trains on", description=inspect_data.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    inspect_data.add_data_arguments(data)
    data.set_defaults(inspect=inspect_data.run_data)


def run(args: argparse.Namespace) -> int:
    return int(args.inspect(args))
