"""Submits a run to Slurm, after everything that can be checked on the login node has been: config, data, and the mesh on the
processes that are asked for. The job script and the effective config are written into the run directory; what was submitted is
what runs, also after a requeue, whatever becomes of the config file meanwhile.

  kamui-dist submit configs/gpt2_1558m_fsdp.toml [section.key=value ...] --nodes 2 --gpus-per-node 8 --time 24:00:00

Other options of sbatch: --sbatch=--qos=long, as often as needed. `sbatch RUN/job.sbatch` submits the same again.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import kamui_dist
from kamui_dist import config, jobs
from kamui_dist.commands.words import take_anywhere
from kamui_dist.errors import UserError
from kamui_dist.files import write_text
from kamui_dist.plan import make_plan

PROJECT = Path(kamui_dist.__file__).resolve().parents[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a TOML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for example optim.lr=3e-4")
    take_anywhere(parser, "overrides")
    parser.add_argument("--nodes", type=_positive, required=True, metavar="N")
    parser.add_argument("--gpus-per-node", type=_positive, metavar="N", help="one process for each")
    parser.add_argument(
        "--procs-per-node", type=_positive, metavar="N", help="processes a node, where there are no GPUs"
    )
    parser.add_argument(
        "--time", required=True, metavar="LIMIT", help="for example 24:00:00; the run is requeued until it is done"
    )
    parser.add_argument("--partition", metavar="NAME")
    parser.add_argument("--account", metavar="NAME")
    parser.add_argument(
        "--cpus-per-node",
        type=_positive,
        metavar="N",
        help="cores (default: the share that belongs to its GPUs; without GPUs, one for each process)",
    )
    parser.add_argument("--warning", type=_positive, default=180, metavar="SECONDS",
                        help="how long before the limit the ranks are told to save and stop (default: 180)")  # fmt: skip
    parser.add_argument("--launcher", choices=["torchrun", "srun"], default="torchrun", help="who starts the ranks")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="--OPTION=VALUE", help="any other option of sbatch"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check, and print the job script; write and submit nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Raises UserError for a config, data or mesh that does not fit, a run that has a job already, a project directory without
    the job scripts, and what sbatch refuses."""
    per_node = args.gpus_per_node or args.procs_per_node
    if per_node is None or (args.gpus_per_node and args.procs_per_node):
        raise UserError("give --gpus-per-node, or --procs-per-node where there are no GPUs")
    if bad := [o for o in args.sbatch if not re.fullmatch(r"-[-\w]+(=.*)?", o)]:
        raise UserError(f"--sbatch={bad[0]}: write it as --sbatch=--option=value")
    world = args.nodes * per_node
    cfg, _ = config.load(Path(args.config), args.overrides)
    strategy = make_plan(cfg, world).strategy  # without torch: a wrong mesh is answered at once
    run_dir = Path(cfg.run.dir or "").absolute()
    for job in jobs.known(run_dir):
        if state := jobs.state(job):
            raise UserError(
                f"run.dir: {run_dir} has job {job} already ({state}); scancel it, or choose another run.dir"
            )
    _check(args, world)
    text = script(args, run_dir, cfg.run.dir or "", per_node, strategy)
    if args.dry_run:
        print(text)
        return 0
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise UserError("there is no sbatch here; log in to a submit host (--dry-run needs none)")
    run_dir.mkdir(parents=True, exist_ok=True)
    cfg.run.dir = str(run_dir)
    write_text(run_dir / "job.toml", config.to_toml(cfg))
    write_text(run_dir / "job.sbatch", text)
    done = subprocess.run(
        [sbatch, "--parsable", str(run_dir / "job.sbatch")], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UserError(f"sbatch: {done.stderr.strip() or done.returncode}")
    job = done.stdout.strip().split(";")[0]
    jobs.note(run_dir, job)
    print(f"job {job}: {strategy} on {args.nodes} node(s) x {per_node} = {world} process(es); {run_dir}")
    for command, meaning in (
        (f"tail -F {run_dir}/job-{job}.out", "what it prints (the file appears when the job starts)"),
        (f"kamui-dist status {_short(run_dir)}", "how far it is"),
        (f"touch {run_dir}/STOP", "stop with a checkpoint; it is not requeued"),
        (f"scancel {job}", "the same, if a checkpoint is written in the seconds before it is killed"),
        (f"sbatch {run_dir}/job.sbatch", "go on, after either"),
    ):
        print(f"  {command}\n      {meaning}")
    return 0


def script(args: argparse.Namespace, run_dir: Path, shown: str, per_node: int, strategy: str) -> str:
    """The job script: slurm/train.sbatch or srun.sbatch with its #SBATCH lines and variables filled in."""
    name = "train.sbatch" if args.launcher == "torchrun" else "srun.sbatch"
    path = PROJECT / "slurm" / name
    if not path.is_file():
        raise UserError(f"{path} is missing: kamui-dist submit works from a checkout of the project (pip install -e .)")
    tasks = 1 if args.launcher == "torchrun" else per_node
    options = {
        "job-name": Path(shown).name, "nodes": args.nodes, "gpus-per-node": args.gpus_per_node, "ntasks-per-node": tasks,
        "cpus-per-task": max(1, (args.cpus_per_node or _cores(args, per_node)) // tasks),
        "time": args.time, "signal": f"USR1@{args.warning}", "partition": args.partition, "account": args.account,
        "chdir": Path.cwd(), "output": run_dir / "job-%j.out",
    }  # fmt: skip
    lines, left = [], {key: value for key, value in options.items() if value is not None}
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"#SBATCH --([-\w]+)(=\S+)?", line):
            key = match[1]
            if key in left:
                line = f"#SBATCH --{key}={_word(left.pop(key))}"
            elif key == "gpus-per-node":
                continue
        elif line.startswith("# Also, as your cluster wants it"):
            lines += [f"#SBATCH --{key}={_word(value)}" for key, value in left.items()]
            lines += [f"#SBATCH {option}" for option in args.sbatch]
            continue
        elif line.startswith("PROJECT_DIR="):
            line = f"PROJECT_DIR={shlex.quote(str(PROJECT))}"
        elif line.startswith("ENV_DIR="):
            line = f"ENV_DIR={shlex.quote(sys.prefix)}"
            lines += [line, f"set -- {shlex.quote(str(run_dir / 'job.toml'))}"]
            lines += [] if args.gpus_per_node else [f"export NPROC={per_node}"]
            continue
        lines.append(line)
    what = shlex.join([args.config, *args.overrides])
    made = f"# Made by kamui-dist {kamui_dist.__version__} submit, code {_code()}: {strategy}, {what}"
    return "\n".join([lines[0], made, *lines[1:]]) + "\n"


def _cores(args: argparse.Namespace, per_node: int) -> int:
    """Of a node, those that belong to the GPUs that are asked for, on the smallest node of the partition; 8 a GPU if unknown."""
    if not args.gpus_per_node:
        return per_node
    sinfo = shutil.which("sinfo")
    if sinfo is not None:
        partition = [f"--partition={args.partition}"] if args.partition else []
        done = subprocess.run(
            [sinfo, "--noheader", "--format=%c %G", *partition], capture_output=True, text=True, check=False
        )
        found = re.findall(r"^(\d+)\+? \S*?gpu(?::[^:,( ]+)?:(\d+)", done.stdout, re.MULTILINE)
        shares = [int(cores) * per_node // int(gpus) for cores, gpus in found if int(gpus) >= per_node]
        if shares:
            return max(1, min(shares))
    return 8 * per_node


def _check(args: argparse.Namespace, world: int) -> None:
    """What the job itself would find first, data included; by the trainer, since it knows best."""
    done = subprocess.run(
        [sys.executable, "-m", "kamui_dist.train", args.config, *args.overrides, "--check", "--world-size", str(world)],
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        faults = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
        raise UserError("\n".join(faults) or f"the check of the config failed: {done.stderr.strip()[-500:]}")


def _code() -> str:
    done = subprocess.run(
        ["git", "-C", str(PROJECT), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "without git"


def _word(value: object) -> str:
    """sbatch splits its lines like a shell."""
    return shlex.quote(str(value))


def _short(run_dir: Path) -> str:
    """As short as it can be typed here."""
    return str(run_dir.relative_to(Path.cwd())) if run_dir.is_relative_to(Path.cwd()) else str(run_dir)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number (1 or more)")
    return int(text)
