"""Train a language model:

    python -m kamui_dist.train configs/austen_tiny.toml [section.key=value ...]              one process
    torchrun --standalone --nproc_per_node=8 -m kamui_dist.train configs/... [...]           one node

The loop below is the whole trainer. One iteration is one optimizer step, in seven sections. What a step decides on is agreed
by all ranks in one message (`gather_rows`); below it every `if` reads values that all ranks share.
"""

from __future__ import annotations

import gc
import math
import pdb
import sys
import time

from kamui_dist import command_line

if __name__ == "__main__":
    # Before torch is imported, which takes seconds: signals are heard from here on, and a wrong config is answered at once.
    COMMAND = command_line.begin(sys.argv[1:])
    gc.disable()  # importing makes no garbage, and looking for it takes a fifth of the time

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from kamui_dist import banner, distributed, optim, parallel, precision, rollback, rundir, signals, sources, start
from kamui_dist.config import Config
from kamui_dist.data import Loader
from kamui_dist.errors import EXIT_DIVERGED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from kamui_dist.findings import gravest
from kamui_dist.hparams import settings
from kamui_dist.metrics import Metrics, mfu, peak_flops, peak_memory_gib
from kamui_dist.monitor import Monitor
from kamui_dist.plan import make_plan, watch_facts
from kamui_dist.profiler import Profiler
from kamui_dist.report import summary
from kamui_dist.samples import Sampler
from kamui_dist.saver import Saver
from kamui_dist.signals import BY_HAND, REASONS, StopRequest
from kamui_dist.state import State
from kamui_dist.stopwatch import Stopwatch, memory_gib, slowest
from kamui_dist.validation import Validator, measured
from kamui_dist.watch import Observation, Watch
from kamui_dist.watchdog import Watchdog
from kamui_dist.worst import Incidents


def train(cfg: Config, stop: StopRequest) -> int:
    """Runs or resumes the run that `cfg` describes, on all ranks; returns the exit code (see errors.py), or rollback.AGAIN."""
    device = distributed.choose_device(cfg.run.device)
    precision.set_backends(device, cfg.run.precision, cfg.run.deterministic)
    torch.autograd.set_detect_anomaly(cfg.run.debug)
    distributed.start(device, cfg.run.timeout_minutes)
    rank, ranks = distributed.rank(), distributed.world_size()  # every rank is a data-parallel rank
    run_dir = rundir.locate(cfg)  # and from here on it is ours alone

    with distributed.together():
        train_data, val_sets = sources.open_datasets(cfg)
    sources.same_everywhere(train_data, val_sets)
    with distributed.together():
        plan = make_plan(cfg, ranks, train_data.windows)
        model = start.build_model(cfg)
        sources.check_model(cfg, model)
        parallel.check_shards(model, plan)
    counts = banner.count(model, cfg)
    rollbacks = rollback.obey(run_dir)
    found = start.find_checkpoint(cfg, run_dir, train_data)
    state = State.from_dict(found.state["state"] if found else {}, measured(cfg, plan, val_sets))
    gaps = rollback.settle(run_dir, state, rollbacks)
    with distributed.together():  # only now it is known how many steps are left
        plan = make_plan(cfg, ranks, train_data.windows, done=(state.step, state.samples, state.tokens))
    if state.is_over(plan.steps, cfg.eval.patience, validates=bool(val_sets)):
        return rundir.nothing_left(run_dir, plan, state)
    facts = start.facts(cfg, plan, train_data, device) | {"validation": state.validated_on}
    with distributed.together():
        changed = start.changes(cfg, found, facts)
        weights = None if found else start.find_weights(cfg, model)
    rundir.prepare(run_dir)  # nothing is made before all that can be checked has been
    watchdog = Watchdog(run_dir, cfg.run, rank, ranks, state, rundir.hung)
    watchdog.start()

    mesh = distributed.make_mesh(device, plan.replicate, plan.shard)
    model = parallel.parallelize(model, cfg, plan, mesh, device)
    module = parallel.unwrap(model)  # the same, without DDP's wrapper
    start.expect_loss(cfg, module)
    optimizer = optim.build(module, cfg.optim)
    scaler = precision.LossScaler(enabled=cfg.run.precision == "fp16")
    watch = Watch(cfg.watch, watch_facts(cfg, plan, weights is None, train_data.repeats, train_data.entropy))
    clock = Stopwatch(device)
    monitor = Monitor(model, cfg, plan, device, clock)
    origin = start.restore(cfg, found, weights, module, optimizer, watch, scaler, monitor.noise, changed, state)
    peak = peak_flops(device, cfg.run.precision, cfg.log.peak_flops)
    by_source = sources.BySource(train_data, module, device)
    sampler = Sampler(cfg, module, train_data.tokenizer, [*val_sets.values(), *train_data.streams][0], device)
    rundir.describe(run_dir, cfg, device, train_data.fingerprint, train_data.tokenizer, counts.parameters)
    metrics = Metrics(
        run_dir, rank == 0, cfg.log.every, plan.steps, cfg.log.tensorboard, state.step, settings(cfg, plan), state.evaluation_due
    )  # fmt: skip
    metrics.say(banner.text(cfg, plan, counts, train_data, val_sets, by_source.losses, device, origin, run_dir))
    begun = "resume" if found else "start"
    metrics.write(begun, **state.position(), **start.record(plan, train_data, changed, metrics.lost))
    for turn in rollback.untold(run_dir, state):
        metrics.write("rollback", **turn.record)
        metrics.findings([turn.finding])
    metrics.text("config", banner.config_text(cfg))
    rundir.write_status(run_dir, "running", state.step)
    loader = Loader(
        train_data, context_length=cfg.model.context_length, micro_batch=cfg.train.micro_batch, rank=rank, ranks=ranks,
        grad_accum_steps=plan.grad_accum_steps, seed=cfg.run.seed, vocab_size=cfg.model.vocab_size, device=device,
        first_sample=0 if cfg.train.overfit_one_batch else state.samples, limit=plan.total_samples,
        document_mask=cfg.data.document_mask, gaps=gaps, repeat=cfg.train.overfit_one_batch,
    )  # fmt: skip
    saver = Saver(run_dir, cfg, plan, module, optimizer, watch, scaler, monitor.noise, metrics, facts)
    pace = start.pace(cfg, run_dir, bool(val_sets), counts.parameters, saved=lambda: saver.seconds)
    profiler = Profiler(cfg.log, run_dir, device, rank == 0, metrics.say)
    incidents = Incidents(run_dir, cfg, plan, module, train_data, device)
    micro_batches, outcome, reason, action, step_seconds = None, "finished", "", "", 0.0

    rate = start.learning_rate(cfg, plan, state.rollbacks)
    validator = Validator(cfg, plan, val_sets, module, device, watch, metrics, stop, pace, sampler)

    asked = distributed.agreed_max(stop.poll(pace.save), device)  # while all this was made ready
    stop.stop_file = run_dir / "STOP" if rank == 0 else None
    due = state.evaluation_due and bool(val_sets) and not asked
    _, asked, findings = validator.run(state, 0) if due else (False, asked, [])
    if asked:
        outcome, reason = "stopped", REASONS[int(asked)]  # there is nothing new to save
    elif (action := gravest(findings)) in ("rollback", "stop"):
        outcome, reason = "failed", f"watch: {findings[0].kind}"
    elif due:
        if state.out_of_patience(cfg.eval.patience):
            outcome, reason = "early_stopped", state.impatience
        if fault := saver.save(state, final=bool(reason)):  # in place of the one without this validation
            outcome, reason = "failed", fault

    # Collections would pause the ranks at different moments, each pause felt by all: they run below, at the same step everywhere.
    gc.collect()
    gc.disable()

    for step in range(state.step, state.step if reason else plan.steps):
        profiler.step(step + 1)
        began, seen = time.perf_counter(), state.samples

        # 1. batch: this rank's micro-batches of global batch `step`, already on the device
        micro_batches = loader.next()  # [(inputs, targets, and documents if masked; (B, T) each)] * accumulation

        # 2. forward + loss: cross-entropy summed over targets. The mean is over the targets of the whole global batch, whose
        #    number is known only when all ranks have met: until then the divisor is tokens_per_step, corrected in 4.
        clock.start()
        detail = monitor.begin(step + 1)
        loss_sum, targets = torch.zeros(2, dtype=torch.float64, device=device).unbind()
        for i, (x, y, *documents) in enumerate(micro_batches):
            distributed.seed_random(cfg.run.seed, step, i)
            with parallel.gradient_sync(model, last=i == len(micro_batches) - 1, defer=cfg.parallel.defer_sync):
                with precision.autocast(device, cfg.run.precision):
                    losses = model(x, y, *documents, **by_source.arguments)  # (); where sources are told apart (B,)

                # 3. backward: ranks are averaged by DDP and FSDP, hence the factor `ranks`
                clock.lap("own")
                (losses.sum() * (scaler.scale * ranks / plan.tokens_per_step)).backward()
            loss_sum += losses.detach().sum()
            targets += (y != -100).sum()
            by_source.add(losses.detach(), y, loader.sources, i)
        whole_norm = parallel.grad_norm(model)  # of the global batch, not yet of its mean
        clock.lap("backward")

        # 4. update: what all ranks must know travels in one message; from here on, all decide alike
        rows = distributed.gather_rows(
            loss_sum, targets, whole_norm, stop.poll(pace.margin(state.step + 1, time.perf_counter() - began)),
            loader.data_seconds, peak_memory_gib(device), saver.code(), memory_gib(device), clock.own_seconds, step_seconds,
            *by_source.sums(), device=device,
        )  # fmt: skip  # (ranks, 10, and 2 a source)
        clock.lap("meet")
        saver.poll([int(r[6]) for r in rows])  # an asynchronous save that all ranks have finished is published
        total_targets = sum(r[1] for r in rows)
        mean_loss = sum(r[0] for r in rows) / total_targets if total_targets else math.nan
        unscale = plan.tokens_per_step / (total_targets * scaler.scale) if total_targets else math.nan
        raw_norm, asked, data_seconds, peak_memory, memory = (max(r[k] for r in rows) for k in (2, 3, 4, 5, 7))
        slow, before = slowest([r[8] for r in rows]), rows[0][9] or None  # seconds that the step before took on rank 0
        norm, post_clip = raw_norm * unscale, math.nan
        finite = math.isfinite(mean_loss) and all(math.isfinite(r[2]) for r in rows)
        lr = rate(step)
        verdict = watch.observe(Observation(
            step + 1, mean_loss, norm, lr, finite, before, data_seconds, before and plan.tokens_per_step / before, memory, **slow,
        ))  # fmt: skip
        monitor.before_update(unscale)
        updates = finite and verdict.action in ("", "note", "warn")
        if updates:
            norm, post_clip = parallel.clip_grad_norm(model, raw_norm, unscale, cfg.optim.grad_clip)
            optim.set_lr(optimizer, lr)
            optimizer.step()
        clock.lap("update")
        optimizer.zero_grad(set_to_none=True)
        scaler.update(finite)
        state.advance(plan)
        if state.step % cfg.train.gc_every == 0:
            gc.collect()
        pace.step(step_seconds := time.perf_counter() - began)

        # 5. log: one record, rank 0 writes
        utilisation = mfu(speed := plan.tokens_per_step / step_seconds, counts.flops_per_token, peak, ranks)
        metrics.write(
            "step", step=state.step, tokens=state.tokens, epoch=state.samples / train_data.windows, loss=mean_loss,
            loss_average=verdict.average, spike=verdict.spike, lr=lr, grad_norm_pre_clip=norm, grad_norm_post_clip=post_clip,
            skipped=not updates, loss_scale=scaler.scale if scaler.enabled else None, targets=int(total_targets), mfu=utilisation,
            tokens_per_sec=speed, step_seconds=step_seconds, data_seconds=data_seconds, **slow, **clock.record(),
            peak_memory_gib=peak_memory, memory_gib=memory, **by_source.record(rows, state.samples, gaps),
        )  # fmt: skip
        metrics.console(state.step, mean_loss, lr, norm, speed, utilisation)
        findings = list(verdict.findings)
        if detail:
            layers = monitor.after_update(x, y, *documents)
            metrics.write("detail", step=state.step, **layers)
            findings += watch.detailed(state.step, layers)
        metrics.findings(findings)

        # 6. evaluate: every rank takes part; who was asked to stop saves first and evaluates after the resume
        last, improved = state.step == plan.steps, False
        if validator.due(state.step, last):
            improved, asked, more = validator.run(state, asked)
            findings += more
            if state.out_of_patience(cfg.eval.patience):
                outcome, reason = "early_stopped", state.impatience
        incidents.write(findings, watch.skipped_in_a_row, mean_loss, state, micro_batches, seen, gaps)
        if (action := gravest(findings)) in ("rollback", "stop"):
            outcome, reason = "failed", f"watch: {next(f.kind for f in findings if f.action == action)}"
            break  # without a checkpoint: the last good one is the one to go back to

        # 7. checkpoint: every rank takes part
        if asked and not reason and (not last or state.evaluation_due):
            outcome, reason = "stopped", REASONS[int(asked)]
        saving = last or bool(reason) or saver.due(state, improved, updates)
        if saving and (fault := saver.save(state, final=last or bool(reason))):
            outcome, reason = "failed", fault
        # Long only in the first step and in those after a save, which ranks leave at different moments.
        distributed.set_timeout(cfg.run.timeout_minutes if saving else 1.5 * cfg.run.hang_minutes)
        if reason:
            break

    if saver.condemned and micro_batches:
        incidents.write([saver.condemned], 0, mean_loss, state, micro_batches, seen, gaps)
    saver.wait()
    loader.close()
    profiler.close()
    gc.enable()
    if outcome == "failed" and action == "rollback":
        ordered, why_not = rollback.order(run_dir, cfg.watch, state, plan.global_batch, findings)
        if ordered:
            metrics.write("rollback", **ordered.record)
            metrics.findings([ordered.finding])
            metrics.close()
            watchdog.stop()
            return rollback.AGAIN
        reason = f"watch: {why_not}"
    if outcome == "failed" and action in ("rollback", "stop"):
        rollback.condemn(run_dir, state, findings)
    code = {"stopped": EXIT_STOPPED, "failed": EXIT_DIVERGED}.get(outcome, EXIT_FINISHED)
    metrics.write("end", step=state.step, tokens=state.tokens, outcome=outcome, reason=reason)
    metrics.close()
    rundir.close(run_dir, outcome, state.step, reason, code, requeue=outcome == "stopped" and reason not in BY_HAND)
    if rank == 0:
        last_line = banner.farewell(outcome, reason, state, run_dir, incidents.last)
        print(summary.closing(run_dir), last_line, sep="\n", flush=True)
    distributed.stop()
    return code


def main() -> int:
    """`train`, with every way to end told: on stderr, in status.json, by the exit code."""
    cfg, stop = COMMAND
    gc.freeze()  # what has been imported stays
    gc.enable()
    try:
        while (code := train(cfg, stop)) == rollback.AGAIN:
            gc.collect()  # the model of before
        return command_line.for_launcher(code)
    except UserError as error:
        command_line.tell(error)
        rundir.record_failure(cfg, error, EXIT_USER_ERROR)
        return command_line.for_launcher(EXIT_USER_ERROR, agreed=error.agreed)
    except KeyboardInterrupt as error:
        rundir.record_failure(cfg, error, 130)
        return 130
    except Exception as error:
        rundir.tell_failure(cfg, error)
        if cfg.run.debug and sys.stdin.isatty():
            sys.excepthook(*sys.exc_info())
            pdb.post_mortem(error.__traceback__)
        raise
    finally:
        signals.ignore()
        gc.enable()
        rundir.release()


if __name__ == "__main__":
    sys.exit(record(main)())
