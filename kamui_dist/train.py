"""Train a language model:

    python -m kamui_dist.train configs/austen_tiny.toml [section.key=value ...]              one process
    torchrun --standalone --nproc_per_node=8 -m kamui_dist.train configs/... [...]           one node

The loop below is the whole trainer. One iteration is one optimizer step, in seven sections. What a step decides on is agreed
by all ranks in one message (`gather_rows`); below it every `if` reads values that all ranks share.
"""

from __future__ import annotations

import gc
import math
import os
import pdb
import sys
import time
import traceback

from kamui_dist import command_line

if __name__ == "__main__":
    # Before torch is imported, which takes seconds: signals are heard from here on, and a wrong config is answered at once.
    COMMAND = command_line.begin(sys.argv[1:])

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from kamui_dist import banner, checkpoint, distributed, optim, parallel, precision, rundir, start
from kamui_dist.config import Config
from kamui_dist.data import Loader, evaluation_batches
from kamui_dist.errors import EXIT_DIVERGED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from kamui_dist.evaluate import evaluate
from kamui_dist.metrics import Metrics, mfu, peak_flops, peak_memory_gib
from kamui_dist.plan import make_plan
from kamui_dist.schedule import lr_at
from kamui_dist.signals import REASONS, StopRequest
from kamui_dist.state import State
from kamui_dist.watch import Watch


def train(cfg: Config, stop: StopRequest) -> int:
    """Runs or resumes the run that `cfg` describes, on all ranks; returns the exit code (see errors.py)."""
    device = distributed.choose_device(cfg.run.device)
    precision.set_backends(device, cfg.run.precision, cfg.run.deterministic)
    torch.autograd.set_detect_anomaly(cfg.run.debug)
    distributed.start(device, cfg.run.timeout_minutes)
    rank, ranks = distributed.rank(), distributed.world_size()  # every rank is a data-parallel rank

    with distributed.together():
        train_data, val_data = start.open_datasets(cfg)
        windows = train_data.windows(cfg.model.context_length)
        plan = make_plan(cfg, ranks, windows)
        model = start.build_model(cfg)
        parallel.check_shards(model, plan)
    counts = banner.count(model, cfg)
    run_dir = rundir.locate(cfg)
    found = start.find_checkpoint(cfg, run_dir, train_data.fingerprint)
    state = State() if found is None else State.from_dict(found.state["state"])
    if state.step >= plan.steps or state.out_of_patience(cfg.eval.patience):
        if rank == 0:
            print(f"nothing left to do: {run_dir} is finished at step {state.step} of {plan.steps}")
        distributed.stop()
        return EXIT_FINISHED
    with distributed.together():
        weights = None if found else start.find_weights(cfg, model)
    rundir.prepare(run_dir)  # nothing is made before all that can be checked has been

    mesh = distributed.make_mesh(device, plan.replicate, plan.shard)
    model = parallel.parallelize(model, cfg, plan, mesh, device)
    module = parallel.unwrap(model)  # the same, without DDP's wrapper
    optimizer = optim.build(module, cfg.optim)
    scaler = precision.LossScaler(enabled=cfg.run.precision == "fp16")
    watch = Watch(cfg.watch.spike_factor, cfg.watch.window, cfg.watch.max_skipped)
    origin = start.restore(cfg, found, weights, module, optimizer, watch, scaler)
    peak = peak_flops(device, cfg.run.precision, cfg.log.peak_flops)
    rundir.describe(run_dir, cfg, device, train_data.fingerprint, train_data.tokenizer)
    metrics = Metrics(run_dir, rank == 0, cfg.log.every, plan.steps, cfg.log.tensorboard, resumed=state.step)
    metrics.say(banner.text(cfg, plan, counts, train_data, val_data, device, origin, run_dir))
    metrics.write("start" if found is None else "resume", step=state.step, tokens=state.tokens, world_size=ranks)
    metrics.text("config", banner.config_text(cfg))
    rundir.write_status(run_dir, "running", state.step)
    stop.stop_file = run_dir / "STOP" if rank == 0 else None
    loader = Loader(
        train_data, context_length=cfg.model.context_length, micro_batch=cfg.train.micro_batch,
        grad_accum_steps=plan.grad_accum_steps, rank=rank, ranks=ranks, seed=cfg.run.seed, first_sample=state.samples,
        device=device, limit=plan.total_samples, vocab_size=cfg.model.vocab_size,
    )  # fmt: skip
    micro_batches, outcome, reason, step_seconds, save_seconds = None, "finished", "", 0.0, 0.0

    def validate() -> bool:
        """Every rank takes part. Returns whether the loss is the best so far."""
        assert val_data is not None
        limit = cfg.eval.batches * plan.global_batch if cfg.eval.batches else None
        batches = evaluation_batches(val_data, cfg.model.context_length, cfg.train.micro_batch, rank, ranks, limit)
        val_loss, _, seconds = evaluate(module, batches, device, cfg.run.precision)
        improved = state.judge(val_loss, cfg.eval.min_improvement)
        metrics.evaluation(state, val_loss, seconds, improved)
        return improved

    def save() -> float:
        """Every rank takes part. Returns seconds."""
        began = time.perf_counter()
        metrics.sync()
        checkpoint.save(run_dir / "checkpoints", state.step, checkpoint.training_tensors(module, optimizer), {
            "state": state.to_dict(), "watch": watch.state(), "scaler": scaler.state(), "config": cfg.model_dump(),
            "world_size": ranks, "strategy": plan.strategy, "data_fingerprint": train_data.fingerprint,
        })  # fmt: skip
        seconds = time.perf_counter() - began
        rundir.published(run_dir, cfg, state)
        metrics.checkpoint(state, seconds)
        return seconds

    if state.evaluation_due and val_data is not None:
        state.evaluation_due = False
        if validate() and cfg.checkpoint.best:
            save()

    # Collections would pause the ranks at different moments, each pause felt by all: they run below, at the same step everywhere.
    gc.collect()
    gc.disable()

    for step in range(state.step, plan.steps):
        began = time.perf_counter()

        # 1. batch: this rank's micro-batches of global batch `step`, already on the device
        if micro_batches is None or not cfg.train.overfit_one_batch:
            micro_batches = loader.next()  # [(inputs (B, T), targets (B, T))] * grad_accum_steps

        # 2. forward + loss: cross-entropy summed over targets. The mean is over the targets of the whole global batch, whose
        #    number is known only when all ranks have met: until then the divisor is tokens_per_step, corrected in 4.
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        targets = torch.zeros((), dtype=torch.float64, device=device)
        for i, (x, y) in enumerate(micro_batches):
            distributed.seed_random(cfg.run.seed, step, i)
            with parallel.gradient_sync(model, last=i == len(micro_batches) - 1, defer=cfg.parallel.defer_sync):
                with precision.autocast(device, cfg.run.precision):
                    loss = model(x, y)

                # 3. backward: ranks are averaged by DDP and FSDP, hence the factor `ranks`
                (loss * (scaler.scale * ranks / plan.tokens_per_step)).backward()
            loss_sum += loss.detach()
            targets += (y != -100).sum()

        # 4. update: what all ranks must know travels in one message; from here on, all decide alike
        norm_on_device = parallel.grad_norm(model)
        heard = stop.poll(margin_seconds=2 * step_seconds + 1.5 * save_seconds)
        rows = distributed.gather_rows(
            loss_sum, targets, norm_on_device, heard, loader.data_seconds, peak_memory_gib(device), device=device
        )  # (ranks, 6)
        total_targets = sum(r[1] for r in rows)
        mean_loss = sum(r[0] for r in rows) / total_targets if total_targets else math.nan
        unscale = plan.tokens_per_step / (total_targets * scaler.scale) if total_targets else math.nan
        norm = max(r[2] for r in rows)
        asked, data_seconds, memory = (max(r[k] for r in rows) for k in (3, 4, 5))
        lr = lr_at(
            step, kind=cfg.schedule.kind, peak=cfg.optim.lr, floor=cfg.schedule.min_lr, total=plan.steps,
            warmup=plan.warmup_steps, decay=plan.decay_steps, decay_shape=cfg.schedule.decay_shape,
        )  # fmt: skip
        finite = math.isfinite(mean_loss) and all(math.isfinite(r[2]) for r in rows)
        post_clip = math.nan
        if finite:
            norm, post_clip = parallel.clip_grad_norm(model, norm, unscale, cfg.optim.grad_clip)
            optim.set_lr(optimizer, lr)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scaler.update(finite)
        state.advance(plan)
        if state.step % cfg.train.gc_every == 0:
            gc.collect()
        step_seconds = time.perf_counter() - began

        # 5. log: one record, rank 0 writes
        average, spike, findings = watch.observe(state.step, mean_loss, norm, skipped=not finite)
        speed = plan.tokens_per_step / step_seconds
        utilisation = mfu(speed, counts.flops_per_token, peak, ranks)
        metrics.write(
            "step", step=state.step, tokens=state.tokens, epoch=state.samples / windows, loss=mean_loss,
            loss_average=average, spike=spike, lr=lr, grad_norm_pre_clip=norm, grad_norm_post_clip=post_clip,
            skipped=not finite, loss_scale=scaler.scale if scaler.enabled else None, targets=int(total_targets),
            tokens_per_sec=speed, mfu=utilisation, step_seconds=step_seconds, data_seconds=data_seconds,
            peak_memory_gib=memory,
        )  # fmt: skip
        metrics.console(state.step, mean_loss, lr, norm, speed, utilisation)
        metrics.findings(findings)
        if any(f.action == "stop" for f in findings):
            outcome, reason = "failed", f"watch: {findings[-1].kind}"
            break  # without a checkpoint: the last good one is the one to go back to

        # 6. evaluate: every rank takes part; who was asked to stop saves first and evaluates after the resume
        last, improved = state.step == plan.steps, False
        if val_data is not None and (last or (cfg.eval.every and state.step % cfg.eval.every == 0)):
            state.evaluation_due = bool(asked) and not last
            improved = not state.evaluation_due and validate()
            if state.out_of_patience(cfg.eval.patience):
                outcome, reason = "early_stopped", f"{state.evals_since_best} validations without improvement"

        # 7. checkpoint: every rank takes part
        if asked and not last and not reason:
            outcome, reason = "stopped", REASONS[int(asked)]
        if last or reason or state.step % cfg.checkpoint.every == 0 or (improved and cfg.checkpoint.best):
            save_seconds = save()
        if reason:
            break

    loader.close()
    gc.enable()
    code = {
        "finished": EXIT_FINISHED,
        "early_stopped": EXIT_FINISHED,
        "stopped": EXIT_STOPPED,
        "failed": EXIT_DIVERGED,
    }[outcome]
    metrics.write("end", step=state.step, tokens=state.tokens, outcome=outcome, reason=reason)
    metrics.say(banner.farewell(outcome, reason, state, run_dir))
    metrics.close()
    rundir.write_status(run_dir, outcome, state.step, reason, code, requeue=outcome == "stopped")
    distributed.stop()
    return code


def main() -> int:
    """`train`, with every way to end told: on stderr, in status.json, by the exit code."""
    cfg, stop = COMMAND
    try:
        return command_line.for_launcher(train(cfg, stop))
    except UserError as error:
        command_line.tell(error)
        rundir.record_failure(cfg, error, EXIT_USER_ERROR)
        return EXIT_USER_ERROR
    except KeyboardInterrupt as error:
        rundir.record_failure(cfg, error, 130)
        return 130
    except Exception as error:
        print(
            f"rank {os.environ.get('RANK', '0')} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True
        )
        rundir.record_failure(cfg, error, 1)
        if cfg.run.debug and sys.stdin.isatty():
            traceback.print_exc()
            pdb.post_mortem(error.__traceback__)
        raise
    finally:
        gc.enable()


if __name__ == "__main__":
    sys.exit(record(main)())
