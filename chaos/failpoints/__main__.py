"""Make real processes fail at each failpoint, and check the recovery times."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from chaos.failpoints.catalogue import BY_NAME, FAILPOINTS
from chaos.failpoints.orders import EXTRA_RECOVERY_S
from chaos.failpoints.playing import ENDED, Part, PartResult, play
from chaos.failpoints.world import BOUNDS_S, Episode
from tests.services import PostgresServer, RedisServer, Services, own_database

#: From this number of seeds on, each failpoint has a deployment of its own.
MANY_SEEDS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="failpoints", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="number of seeds for each failpoint")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", action="append", choices=sorted(BY_NAME), metavar="NAME")
    parser.add_argument(
        "--timer",
        choices=["eta", "redis"],
        help="use only this timer (default: both, alternating between failpoints)",
    )
    parser.add_argument(
        "--database", choices=["postgresql", "mysql", "sqlite"], default="postgresql"
    )
    parser.add_argument("--broker", choices=["redis", "rabbitmq"], default="redis")
    parser.add_argument("--worlds", type=int, default=4, help="number of simultaneous deployments")
    parser.add_argument(
        "--act", choices=list(EXTRA_RECOVERY_S), default="kill", help="how the step fails"
    )
    parser.add_argument(
        "--slack", type=float, default=0, help="seconds added to each bound, for a busy machine"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, end)
    with contextlib.ExitStack() as own:
        database, broker, redis = servers(own, options.database, options.broker)
        parts = [
            Part(
                tuple(names),
                options.first,
                options.seeds,
                timer,
                database,
                broker,
                redis,
                options.act,
            )
            for timer, names in shared(options.timer, options.only, options.worlds, options.seeds)
        ]
        pool = own.enter_context(
            ProcessPoolExecutor(options.worlds, mp_context=get_context("spawn"))
        )
        console, results, slack_s = Console(), [], options.slack + EXTRA_RECOVERY_S[options.act]
        for done in as_completed([pool.submit(play, part) for part in parts]):
            results.append(done.result())
            console.print(
                f"{len(results)} of {len(parts)}: "
                f"{', '.join({e.failpoint for e in results[-1].episodes})}"
            )
    return show(results, slack_s, console)


def end(*_: object) -> None:
    """End the started processes."""
    for world in active_children():
        world.terminate()
    sys.exit(ENDED)


def servers(own: contextlib.ExitStack, database: str, broker: str) -> tuple[str, str, str]:
    """Return the URLs of the database, the broker and Redis.

    PostgreSQL and Redis are started for this run.
    """
    folder = Path(own.enter_context(tempfile.TemporaryDirectory(prefix="delaytasks-failpoints-")))
    folder.chmod(0o755)  # the database may run as another user
    services = Services()
    own.callback(services.close)
    redis = RedisServer(folder)
    own.callback(redis.stop)
    url = ""
    if database == "postgresql":
        (folder / "postgresql").mkdir()
        server = PostgresServer(folder / "postgresql")
        own.callback(server.stop)
        url = server.url
    elif database == "mysql":
        url, drop = own_database(services.url("mysql"))
        own.callback(drop)
    return url, redis.url if broker == "redis" else services.url(broker), redis.url


def shared(
    timer: str | None, only: Sequence[str] | None, worlds: int, seeds: int
) -> list[tuple[str, list[str]]]:
    """Distribute the failpoints over deployments.

    Failpoints that both timers reach alternate between the timers. With many seeds, each failpoint
    has a deployment of its own.
    """
    found: dict[str, list[str]] = {"eta": [], "redis": []}
    for number, failpoint in enumerate(FAILPOINTS):
        if only is None or failpoint.name in only:
            fitting = [name for name in found if failpoint.fits(name) and timer in (None, name)]
            if fitting:
                found[fitting[number % len(fitting)]].append(failpoint.name)
    names = [(timer, name) for timer in found for name in found[timer]]
    if seeds >= MANY_SEEDS:
        return [(timer, [name]) for timer, name in names]
    parts = [
        (timer, [name for at, name in names[number::worlds] if at == timer])
        for timer in found
        for number in range(worlds)
    ]
    return [part for part in parts if part[1]]


def show(results: Sequence[PartResult], slack_s: float, console: Console) -> int:
    episodes = [episode for one in results for episode in one.episodes]
    table = Table("failpoint", "process", "runs", "p50 s", "worst s", "bound s", "inside")
    is_bad = False
    for failpoint in FAILPOINTS:
        mine = [episode for episode in episodes if episode.failpoint == failpoint.name]
        if mine:
            row, is_inside = line(mine, BOUNDS_S[failpoint.bound], slack_s)
            is_bad |= not is_inside
            table.add_row(failpoint.name, failpoint.process_kind, *row)
    console.print(table)
    for failpoint in FAILPOINTS:
        mine = [episode for episode in episodes if episode.failpoint == failpoint.name]
        for one in (episode for episode in mine if episode.is_late(slack_s)):
            console.print(
                f"{failpoint.name}, seed {one.seed}: {one.recovery_s:.2f} s of {one.bound_s:g}",
                highlight=False,
            )
            console.print(one.story, markup=False, highlight=False)
    for result in results:
        if result.findings:
            is_bad = True
            console.print(result.verdict, markup=False, highlight=False)
    tasks, runs = sum(one.tasks for one in results), sum(one.runs for one in results)
    console.print(f"{len(episodes):,} faults, {tasks:,} tasks, {runs:,} runs: ", end="")
    console.print(
        "some bounds were exceeded, or the checker found errors"
        if is_bad
        else "all within their bounds, no findings"
    )
    return 1 if is_bad else 0


def line(mine: Sequence[Episode], bound_s: float, slack_s: float) -> tuple[list[str], bool]:
    reached = sorted(episode.recovery_s for episode in mine if episode.is_reached)
    outside = sum(episode.is_late(slack_s) or bool(episode.left) for episode in mine)
    missed = len(mine) - len(reached)
    p50, most = (f"{median(reached):.2f}", f"{reached[-1]:.2f}") if reached else ("", "")
    inside = (
        "yes"
        if not outside and not missed
        else f"{outside} outside"
        if outside
        else f"{missed} not reached"
    )
    return [str(len(mine)), p50, most, f"{bound_s + slack_s:g}", inside], not outside and not missed


if __name__ == "__main__":
    sys.exit(main())
