"""Monitors that use Celery's `State`, for example Flower, understand the events of rows."""

from __future__ import annotations

import socket
from concurrent.futures import Executor
from typing import Any

import pytest

from delaytasks import DelayedTask, Done
from tests.world import MakeWorld, Monitor, World
from tests.world.recording import ManualTime


@pytest.fixture
def heard(world: World) -> Monitor:
    return Monitor(world)


def order(world: World, *ends: Any, **options: Any) -> DelayedTask:
    """Run a task, and return it. Its runs return or raise these ends, one after another."""
    left = iter(ends)

    def work(body: Any) -> Any:
        end = next(left)
        if isinstance(end, Exception):
            raise end
        return end

    world.delays.processor("order.close", keep_result=True, **options)(work)
    world.run(task := world.schedule("order.close", {"order": 1}))
    return task


def test_a_chunk_is_one_message(world: World, heard: Monitor) -> None:
    world.run(*(tasks := [world.schedule() for _ in range(50)]))
    assert len(heard.messages) == 1
    assert {heard.task(task).state for task in tasks} == {"SUCCESS"}
    assert heard.task(tasks[0]).worker.hostname == "w@test"
    world.run()
    assert len(heard.messages) == 1, "nothing is sent when nothing happened"


def test_a_row_that_is_rerun_is_shown_without_its_old_error(world: World, heard: Monitor) -> None:
    """The run has the same number, since the attempts are counted anew."""
    task = order(world, ValueError("no"), None)
    assert (heard.task(task).state, heard.task(task).exception) == ("FAILURE", "ValueError('no')")
    world.delays.rerun(task.id)
    world.run(world.read(task))
    world.run(deferred := world.schedule("later"))
    assert heard.task(deferred).exception is not None
    world.delays.processor("later")(world.notes.append)
    world.run_again(deferred)
    for shown in map(heard.task, (task, deferred)):
        assert (shown.state, shown.exception, shown.traceback) == ("SUCCESS", None, None)


def test_the_attempt_before_a_lapse_has_failed(world: World, heard: Monitor) -> None:
    seen: list[Any] = []

    @world.delays.processor("poison")
    def look(body: Any, task: DelayedTask) -> None:
        seen.extend(heard.task(task, attempt) for attempt in (1, 2))
        seen.extend(each.state for each in seen[:])

    world.claim(task := world.schedule("poison"), by="worker-2")
    assert world.lapse(task) == 1
    world.run(world.read(task))
    first, second, *states = seen
    assert states == ["FAILURE", "STARTED"], "told at once: it may kill its process again"
    assert "lost its lease" in first.exception
    assert second.parent_id == f"{task.id}-1"


class UnreadableError(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize(
    "error", [UnreadableError(), ValueError("\x00\ud800"), ValueError("x" * 1_000_000)]
)
def test_any_error_text_can_be_sent(world: World, heard: Monitor, error: Exception) -> None:
    shown = heard.task(order(world, error))
    assert shown.state == "FAILURE"
    for text in (shown.exception, shown.traceback):
        assert len(text.encode()) <= 16 * 1024
        assert "\x00" not in text


def test_threads_lose_no_event(world: World, heard: Monitor, pool: Executor) -> None:
    tasks = [world.schedule() for _ in range(90)]
    list(pool.map(world.run, tasks))
    assert heard.events().count("task-succeeded") == 90
    assert {task.state for task in heard.state.tasks.values()} == {"SUCCESS"}


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "silent"])
def test_an_unavailable_broker_takes_little_time_and_no_memory(
    make_world: MakeWorld,
    ahead: ManualTime,
    caplog: pytest.LogCaptureFixture,
    scheme: str,
    is_closed: bool,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, never answers
        silent.setblocking(False)
        port = 1 if is_closed else silent.getsockname()[1]
        world = make_world(broker=f"{scheme}://127.0.0.1:{port}//", _publish_limit_s=0.2)
        monitor = Monitor(world, listens=False)
        tried = [connections(silent) for _ in range(20) if world.run(world.schedule())]
        assert bool(tried[0]) != is_closed
        assert sum(tried[1:]) == 0, "it rests before it tries again"
    assert world.count("task.succeeded") == 20
    assert caplog.text.count("row events are not sent, tasks run on") == 1
    monitor.listen()
    ahead.at += 5
    world.run(world.schedule())
    kinds = ["task-received", "task-started", "task-succeeded"]
    assert monitor.events() == kinds, "it comes back, and kept nothing"


def connections(server: socket.socket) -> int:
    """Return how many clients have connected since the last call."""
    count = 0
    try:
        while True:
            server.accept()[0].close()
            count += 1
    except BlockingIOError:
        return count


def test_bodies_are_shown_unless_the_setting_hides_them(make_world: MakeWorld) -> None:
    for shows_bodies in (True, False):
        heard = Monitor(world := make_world(event_bodies=shows_bodies))
        shown = heard.task(order(world, Done("rEsUlT")))
        assert ('{"order":1}' in shown.args, "rEsUlT" in shown.result) == (shows_bodies,) * 2
        for secret in ('order":', "rEsUlT"):
            assert (secret in str(heard.messages)) == shows_bodies
    assert "event_bodies" in shown.args
