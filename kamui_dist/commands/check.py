"""Preflight: what a run depends on, tested and measured on the very processes that would train, before days are spent on them.
Who they are (host, device, versions, clocks), how fast each computes, the links between them, all-reduce, all-gather and
reduce-scatter on the mesh that CONFIG asks for, the run directory, and whether all strategies still compute the same.

  kamui-dist check [CONFIG] [section.key=value ...]                                           one process
  torchrun --standalone --nproc-per-node=8 -m kamui_dist.cli check CONFIG                     one node
  slurm/interactive.sh check CONFIG                                                           in an allocation

Exit code 0: nothing is wrong; 1: something is, and the last lines say what, and on which rank; 2: the config is wrong.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kamui_dist.commands.words import take_anywhere
from kamui_dist.errors import UserError

if TYPE_CHECKING:
    import torch

    from kamui_dist.config import Config
    from kamui_dist.plan import Plan

_CLOCK_SECONDS = 2.0  # deadlines and heartbeats are compared across nodes
_SHOWN = 64  # ranks in the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="a TOML file (default: DDP over all processes, runs/check)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    take_anywhere(parser, "overrides", one="config")
    parser.add_argument(
        "--megabytes", type=int, metavar="N", help="size of messages and files (default: 64, on a CPU 8)"
    )
    parser.add_argument("--slow-factor", type=float, default=2.0, metavar="X",
                        help="a rank or link is slow if it takes X times as long as the median (default: 2)")  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, default=3.0, help="how long to wait for a rank that does not answer (default: 3)"
    )


def run(args: argparse.Namespace) -> int:
    """Raises UserError for a config that is wrong or does not fit the number of processes."""
    cfg, plan = _plan(args)
    if args.megabytes is not None and args.megabytes < 1:
        raise UserError(f"--megabytes {args.megabytes} must be 1 or more")
    import torch  # noqa: F401  # a wrong config is answered before

    from kamui_dist import distributed

    where = f"rank {os.environ.get('RANK', '0')} on {platform.node()}"
    try:
        device = distributed.choose_device(cfg.run.device)
        distributed.start(device, args.minutes)
        faults = _check(args, cfg, plan, device)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except Exception as error:  # a rank has gone or does not answer: nothing that all agree on can be told any more
        text = str(error).splitlines()[0] if str(error) else ""
        print(f"FAULT {where}: {type(error).__name__}: {text}", file=sys.stderr, flush=True)
        return 1
    if distributed.is_main():
        for fault in faults:
            print(f"FAULT {fault}")
        print(f"check: {len(faults)} fault(s)" if faults else "check: all is well", flush=True)
    distributed.stop()
    return 1 if faults else 0


def _plan(args: argparse.Namespace) -> tuple[Config, Plan]:
    from kamui_dist import config
    from kamui_dist.config import Config
    from kamui_dist.plan import make_plan

    if args.config is None:
        cfg = Config.model_validate({"run": {"dir": "runs/check"}, "train": {"steps": 1, "micro_batch": 1}})
    else:
        cfg, _ = config.load(Path(args.config), args.overrides)
    return cfg, make_plan(cfg, int(os.environ.get("WORLD_SIZE", "1")))


def _check(args: argparse.Namespace, cfg: Config, plan: Plan, device: torch.device) -> list[str]:
    """The faults, the same on all ranks. Collective."""
    from kamui_dist import distributed, precision
    from kamui_dist.commands import parity, preflight

    precision.set_backends(device, "fp32", deterministic=False)
    size = (args.megabytes or (8 if device.type == "cpu" else 64)) << 20
    mesh = distributed.make_mesh(device, plan.replicate, plan.shard)
    run_dir = Path(distributed.broadcast_object(str(Path(cfg.run.dir or "").absolute())))
    mine: dict[str, Any] = {**preflight.identity(device), "compute": preflight.compute(device)}
    mine["clock"] = preflight.clock_offset()
    storage, storage_faults = preflight.storage(run_dir, size)
    mine |= storage
    links, link_faults = preflight.links(device, size)
    mine |= links
    rows = distributed.gather_objects(mine)
    names = [f"rank {r} ({row['host']})" for r, row in enumerate(rows)]

    faults = [f"{names[r]}: {text}" for r, text in storage_faults + link_faults]
    faults += preflight.differences(rows, names)
    faults += [f"{names[r]}: its clock is {row['clock']:+.1f} s off rank 0's" for r, row in enumerate(rows)
               if abs(row["clock"]) > _CLOCK_SECONDS]  # fmt: skip
    for key, what in (("compute", "computes"), ("write", "writes"), ("read", "reads"), ("link_local", "receives (same node)"),
                      ("link_remote", "receives (another node)")):  # fmt: skip
        faults += preflight.slow(rows, names, key, what, args.slow_factor)
    need = preflight.checkpoint_bytes(cfg)
    free = min((row["free"] for row in rows if row["write"]), default=None)  # of ranks that could write
    if need is not None and free is not None and free < 2 * need:
        faults.append(
            f"{run_dir} has {free / 1e9:,.1f} GB free; two checkpoints of this model are {2 * need / 1e9:,.1f} GB"
        )
    if distributed.is_main():
        _table(rows, plan, run_dir, need)
    for line, fault in preflight.collectives(mesh, device, size, names):
        faults += fault
        if distributed.is_main():
            print(f"  {line}")
    for line, fault in parity.parity(device):
        faults += fault
        if distributed.is_main():
            print(f"  {line}")
    return faults


def _table(rows: list[dict[str, Any]], plan: Plan, run_dir: Path, need: int | None) -> None:
    first = rows[0]
    nccl = f", NCCL {first['nccl']}" if first["nccl"] else ""
    hosts = len({row["host"] for row in rows})
    print(f"{plan.strategy} on {len(rows)} process(es), {hosts} host(s); torch {first['torch']}{nccl}, "
          f"Python {first['python']}, {first['device']}")  # fmt: skip
    print(
        f"run directory {run_dir}" + (f"; a checkpoint of this model: {need / 1e9:,.2f} GB" if need is not None else "")
    )
    print(f"{'rank':>6} {'host':<20} {'GFLOP/s':>9} {'clock ms':>9} {'write MB/s':>11} {'read MB/s':>10} {'free GB':>9} "
          f"{'from previous rank MB/s':>24}")  # fmt: skip
    for r, row in enumerate(rows[:_SHOWN]):
        link = row["link_local"] or row["link_remote"]
        print(f"{r:>6} {row['host'][:20]:<20} {row['compute']:>9,.0f} {1000 * row['clock']:>+9.1f} {row['write']:>11,.0f} "
              f"{row['read']:>10,.0f} {row['free'] / 1e9:>9,.0f} {f'{link:,.0f}' if link else '-':>24}")  # fmt: skip
    if len(rows) > _SHOWN:
        print(f"  and {len(rows) - _SHOWN} more")
