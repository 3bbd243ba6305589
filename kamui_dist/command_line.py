"""The command line of `python -m kamui_dist.train`. Imports no torch, so that a mistake is answered before torch is loaded."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from kamui_dist import config, job, lock, schedule, signals
from kamui_dist.config import Config
from kamui_dist.errors import EXIT_DIVERGED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from kamui_dist.plan import Plan, make_plan


def begin(argv: list[str]) -> tuple[Config, signals.StopRequest]:
    """From now on signals are heard; the config is read and checked. Ends the process itself for --print-config and the like
    (exit 0) and for a config that is wrong (exit 2)."""
    stop = signals.StopRequest().install()
    if job.restarts() and _noted():
        sys.exit(EXIT_FINISHED)  # a restart cannot help; see for_launcher
    options = _parser().parse_intermixed_args(argv)  # options may stand before, between and after the overrides
    try:
        strict = ["run.resume_strict=true"] if options.resume_strict else []
        cfg, notes = config.load(Path(options.config), [*options.overrides, *strict])
        dry = bool(options.print_config or options.print_schedule or options.print)
        world_size = options.world_size or _world_size(cfg, dry)
        windows = _windows(cfg) if options.check or (options.print_schedule and cfg.train.epochs) else None
        plan = make_plan(cfg, world_size, windows, None if _begun(cfg) else (0, 0, 0))
        if options.check:
            lock.refuse_if_held(Path(cfg.run.dir or "").absolute())
        if _answer(options, cfg, plan):
            sys.stdout.flush()
            sys.exit(EXIT_FINISHED)
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain again when it flushes stdout at exit.
        _to_nowhere(sys.stdout)
        sys.exit(141)
    except UserError as error:
        error.alike = True
        tell(error)
        sys.exit(EXIT_USER_ERROR)
    sys.stdout, sys.stderr = Patient(sys.stdout), Patient(sys.stderr)
    signals.guard_start_up(stop)
    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(f"note: {note}")
    stop.limit_seconds = None if cfg.run.max_minutes is None else 60 * cfg.run.max_minutes
    stop.end_time = (
        job.end_time() if os.environ.get("RANK", "0") == "0" else None
    )  # one asks the scheduler, all stop with it
    return cfg, stop


def _to_nowhere(stream: TextIO) -> None:
    """From now on, also what Python still has of it to write."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class Patient(io.TextIOBase):
    """A text stream whose reader may go away (a terminal that is closed, head, a collector of logs that was killed), or that was
    closed from the beginning: what it does not take is lost, and the run goes on."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream or open(os.devnull, "w")  # noqa: PTH123, SIM115

    def write(self, text: str) -> int:
        self._try(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):  # for ever; a full disk may have room again
                _to_nowhere(self.stream)

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding


def tell(error: UserError) -> None:
    """One line a fault on stderr. What all ranks agreed on, rank 0 tells; what all ranks of a node found alike, the
    first of them; anything else, the rank that has it. Notes the exit code."""
    _note(EXIT_USER_ERROR)
    rank = os.environ.get("RANK", "0")
    if error.agreed:
        speaks = rank == "0"
    else:
        speaks = not error.alike or os.environ.get("LOCAL_RANK", "0") == "0"
    if speaks:
        for line in str(error).splitlines():
            print(f"error: {line}" if rank == "0" else f"error: rank {rank}: {line}", file=sys.stderr, flush=True)


def for_launcher(code: int, agreed: bool = True) -> int:
    """The exit code of the process. To torchrun any other than 0 is a failure: it would restart what was stopped on request, or
    print pages about it; status.json has the code all the same.

    A user's mistake (2) and a stop by the watch (70) would end the same way again. Where our launch scripts wait for the code in
    a file (KAMUI_EXIT_CODE_FILE), it is noted there, the processes end with 0, and torchrun is silent and restarts nothing; the
    script then ends with the noted code. A torchrun that was started by hand gets the real one: it must not end with 0.
    agreed: every rank of the run ends with this code. If not, torchrun has to end the others: the next attempt then sees the
    noted code, and ends before it has begun.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return code
    if code in (EXIT_USER_ERROR, EXIT_DIVERGED):
        return EXIT_FINISHED if _note(code) and agreed else code
    return EXIT_FINISHED if code == EXIT_STOPPED else code


def _note(code: int) -> bool:
    """Leaves `code` for our launch scripts, if one waits for it."""
    with contextlib.suppress(OSError):
        if path := os.environ.get("KAMUI_EXIT_CODE_FILE"):
            return Path(path).write_text(f"{code}\n", encoding="ascii") > 0
    return False


def _noted() -> bool:
    """Whether an earlier attempt of this torchrun has left a code."""
    with contextlib.suppress(OSError):
        if path := os.environ.get("KAMUI_EXIT_CODE_FILE"):
            return bool(Path(path).read_text(encoding="ascii"))
    return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kamui_dist.train",
        description="Trains a language model. Start it with torchrun for several processes; alone it is one process without a "
        "process group. The same command again resumes the run.",
        epilog="Exit codes: 0 finished, 2 config or data wrong, 75 stopped on request (run it again to go on), 70 stopped by "
        "the watch, 76 a rank hung (run it again).",
    )
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, for example configs/austen_tiny.toml")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="for example optim.lr=3e-4 train.steps=100"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the effective config, every key with its meaning"
    )
    parser.add_argument("--print-schedule", action="store_true", help="draw the learning rate over the run")
    parser.add_argument("--print", metavar="KEY", help="print the value of one key, for example run.dir")
    parser.add_argument(
        "--check", action="store_true", help="check config and data for --world-size processes, then stop"
    )
    parser.add_argument(
        "--resume-strict",
        action="store_true",
        help="go on from a checkpoint only if nothing has changed that would change the trajectory (run.resume_strict)",
    )
    parser.add_argument(
        "--world-size", type=_count, metavar="N", help="processes to plan for (default: those that are there)"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes (1 or more)")
    return int(text)


def _world_size(cfg: Config, dry: bool) -> int:
    """What the launcher says; when only printing without one, what the config's own mesh asks for."""
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world is None:
        fixed = max(cfg.parallel.replicate, 1) * max(cfg.parallel.shard, 1)
        return fixed if dry else 1
    try:
        if not 0 <= int(rank or "") < int(world or ""):
            raise ValueError
    except ValueError:
        raise UserError(
            f"RANK = {rank} and WORLD_SIZE = {world} do not fit together; torchrun sets both, or unset both"
        ) from None
    return int(world or "")


def _begun(cfg: Config) -> bool:
    """Whether there seems to be a checkpoint to go on from. How far that run is, and how many steps are left, is known later."""
    with contextlib.suppress(OSError):  # a name too long, ...: told when the directory is taken
        return any((Path(cfg.run.dir or "") / "checkpoints").glob("step-*"))
    return False


def _windows(cfg: Config) -> int:
    from kamui_dist.sources import open_datasets  # imports torch

    return open_datasets(cfg)[0].windows


def _answer(options: argparse.Namespace, cfg: Config, plan: Plan) -> bool:
    """Prints what was asked for instead of training; False if nothing was."""
    if options.print_config:
        print(f"# {plan.strategy}, {plan.world_size} process(es): {plan.grad_accum_steps} micro-batch(es) a step, "
              f"{plan.global_batch} sequences = {plan.tokens_per_step:,} tokens a step")  # fmt: skip
        print(config.to_toml(cfg, meanings=True))
    if options.print_schedule:
        s = cfg.schedule
        rates = [
            schedule.lr_at(step, kind=s.kind, peak=cfg.optim.lr, floor=s.min_lr, total=plan.steps,
                           warmup=plan.warmup_steps, decay=plan.decay_steps, decay_shape=s.decay_shape)
            for step in range(plan.steps)
        ]  # fmt: skip
        print(
            f"learning rate: {s.kind}, warmup {plan.warmup_steps}, decay {plan.decay_steps}, total {plan.steps} updates"
        )
        print(schedule.draw(rates))
        marks = sorted({1, plan.warmup_steps, plan.steps // 2, plan.steps - plan.decay_steps, plan.steps})
        print("  ".join(f"update {n}: {rates[n - 1]:.3e}" for n in marks if 1 <= n <= plan.steps))
    if options.print:
        section, _, name = options.print.partition(".")
        if options.print not in config.KEYS:
            raise UserError(f"there is no key {options.print}")
        print(cfg.model_dump()[section][name])
    if options.check and not options.print:
        print(f"ok: {plan.strategy}, {plan.steps} steps of {plan.tokens_per_step:,} tokens")
    return bool(options.print_config or options.print_schedule or options.print or options.check)
