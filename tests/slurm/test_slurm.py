"""The job scripts on a real SLURM: launches, limits, preemption, lost nodes, mistakes. docs/clusters.md shows each by hand.

A case drives its job in a thread, some at a time, since most of a case is waiting; the tests look at what came out of it: every
step once in metrics.jsonl, and the weights of a run that nothing interrupted, bit for bit.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from kamui_dist import config
from kamui_dist.config import Config
from tests import tiny
from tests.slurm.cases import CASES, Site
from tests.slurm.cluster import Cluster, missing, records

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 20
AT_A_TIME = 4


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[list[Path]]]]:
    """The cases that were asked for, and the one that they are compared with: under way."""
    if reason := missing():
        if os.environ.get("KAMUI_REQUIRE_SLURM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    asked = {
        i.callspec.params["case"]
        for i in request.session.items
        if hasattr(i, "callspec") and "case" in i.callspec.params
    }
    if any(not hasattr(i, "callspec") for i in request.session.items if i.path == Path(__file__)):
        asked |= {"two_nodes", "srun"}
    base = Path(tempfile.mkdtemp(prefix="kamui-slurm-", dir="/tmp"))  # short: it holds a unix socket
    cluster = None
    began, times = time.monotonic(), {}
    try:
        cluster = Cluster(
            base / "c", nodes=2 * len(CASES), NODE_TIMEOUT="40"
        )  # later than srun: a requeue at that very moment loses the GPUs
        tiny.write_data(base / "data", windows=512)
        pool = ThreadPoolExecutor(AT_A_TIME)

        def timed(case: Callable[[Site], list[Path]], site: Site) -> list[Path]:
            start = time.monotonic()
            try:
                return case(site)
            finally:
                times[case.__name__] = (round(start - began), round(time.monotonic() - began))

        futures = {}
        for number, case in enumerate(CASES):
            name = case.__name__.removeprefix("case_")
            if name not in asked | {"one_node"}:
                continue
            where = base / name
            where.mkdir()
            cfg = tiny.config(
                where / "run", base / "data", train__steps=STEPS, checkpoint__every=5, checkpoint__keep=2,
                model__factory="tests.slurm.paced:paced", model__factory_args={"pace": str(where / "pace")},
            )  # fmt: skip
            tiny.write_toml(where / "c.toml", cfg)
            site = Site(cluster, where, (2 * number + 1, 2 * number + 2))
            site.pace(0)
            futures[name] = pool.submit(timed, case, site)
        yield futures
        pool.shutdown(cancel_futures=True)
    finally:
        if cluster is not None:
            cluster.down()
        print("\nfrom, to (s):", times)
        if not request.session.testsfailed:
            shutil.rmtree(base, ignore_errors=True)


@pytest.mark.parametrize("case", [c.__name__.removeprefix("case_") for c in CASES])
def test_every_step_once_and_the_weights_of_an_uninterrupted_run(
    case: str, outcomes: dict[str, Future[list[Path]]]
) -> None:
    reference = tiny.weights(outcomes["one_node"].result()[0])
    for run in outcomes[case].result():
        assert tiny.status(run)["outcome"] == "finished"
        assert [r["step"] for r in records(run) if r["kind"] == "step"] == list(range(1, STEPS + 1))
        if case == "array":
            cfg = alone(run)
            tiny.run(cfg)
            reference = tiny.weights(Path(cfg.run.dir or ""))
        if case in ("two_nodes", "srun"):  # four ranks add in another order
            assert tiny.distance(tiny.weights(run), reference) < 1e-5
        else:
            assert tiny.same(tiny.weights(run), reference)


def alone(run: Path) -> Config:
    """The same run in another directory."""
    cfg, _ = config.load(run / "config.toml", [f"run.dir={run}-alone"])
    return cfg


def test_torchrun_and_srun_train_alike(outcomes: dict[str, Future[list[Path]]]) -> None:
    [a], [b] = outcomes["two_nodes"].result(), outcomes["srun"].result()
    assert tiny.same(tiny.weights(a), tiny.weights(b))
