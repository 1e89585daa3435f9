"""What a manager hears of its workers, and in which order, whatever their launcher, their channel and their end do."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest

from bftrainer.elastic import protocol
from bftrainer.elastic.manager import processes
from bftrainer.elastic.manager.processes import WorkerEvent, WorkerProcesses
from bftrainer.elastic.protocol import Done, Failed, Generation, Go, Hello, Left, Message, Ready, Taken
from bftrainer.errors import InputError


class MadeUp:
    """A process that ends when it is told to."""

    def __init__(self, *, deaf: bool = False) -> None:
        self.pid = 4711
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.signals: list[int] = []
        self._deaf = deaf

    async def wait(self) -> int:
        return await asyncio.shield(self.exited)

    def signal(self, signum: int) -> None:
        self.signals.append(signum)

    def kill_group(self, signum: int = SIGKILL) -> None:
        self.signals.append(signum)
        if not self._deaf:
            self.end(-signum)

    def end(self, status: int) -> None:
        if not self.exited.done():
            self.exited.set_result(status)


class Managed:
    """Worker processes, and what they told."""

    def __init__(self, folder: Path) -> None:
        self.events: list[WorkerEvent] = []
        self.on_event: Callable[[WorkerEvent], None] = lambda event: None
        self.writers: list[asyncio.StreamWriter] = []
        self.channel = folder / "channel"
        self.workers = WorkerProcesses(self.channel, self.happened)

    def happened(self, event: WorkerEvent) -> None:
        self.events.append(event)
        self.on_event(event)

    @property
    def kinds(self) -> list[str]:
        """The events by name; a message by its own name."""
        return [
            type(event.message if isinstance(event, processes.WorkerSaid) else event).__name__ for event in self.events
        ]

    async def until(self, *kinds: str) -> None:
        """Wait until these events have happened, and no other ones."""
        async with asyncio.timeout(20):
            while len(self.kinds) < len(kinds):
                await asyncio.sleep(0.005)
        assert self.kinds == list(kinds)

    async def start(self, process: MadeUp | None = None, *, speaks: bool = True) -> MadeUp:
        """Start a worker that runs at once."""
        process = process or MadeUp()

        async def launched() -> MadeUp:
            return process

        await self.workers.start("w", launched(), speaks=speaks).is_up.wait()
        return process

    async def start_ranks(self, ranks: int) -> list[MadeUp]:
        """Start a worker with several processes that run at once."""
        made_up = [MadeUp() for _ in range(ranks)]

        async def launched(process: MadeUp) -> MadeUp:
            return process

        await self.workers.start("w", *map(launched, made_up)).is_up.wait()
        return made_up

    async def connect(self, *messages: Message, rank: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect as the worker, and say hello and more."""
        reader, writer = await asyncio.open_unix_connection(self.channel)
        self.writers.append(writer)
        for message in (Hello("w", 4711, local_rank=rank), *messages):
            writer.write(protocol.encode(message))
        return reader, writer


@asynccontextmanager
async def managed() -> AsyncIterator[Managed]:
    with tempfile.TemporaryDirectory(prefix="bft-") as folder:
        manager = Managed(Path(folder))
        await manager.workers.open()
        try:
            yield manager
        finally:
            await asyncio.wait_for(manager.workers.close(), 20)
            for writer in manager.writers:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
            assert manager.workers.running == ()


def play(scene: Callable[[Managed], Awaitable[None]]) -> None:
    async def main() -> None:
        async with managed() as manager:
            await scene(manager)

    asyncio.run(main())


def test_all_messages_come_before_the_end_although_the_process_ended_first() -> None:
    async def scene(manager: Managed) -> None:
        process = await manager.start()
        _, writer = await manager.connect(Ready())
        await manager.until("ProcessStarted", "Hello", "Ready")
        process.end(0)  # noticed while the last message is on its way
        await asyncio.sleep(0)
        writer.write(protocol.encode(Left(3)))
        writer.close()
        await manager.until("ProcessStarted", "Hello", "Ready", "Left", "ProcessEnded")

    play(scene)


def test_the_last_message_is_heard_although_the_manager_writes_at_that_moment() -> None:
    async def scene(manager: Managed) -> None:
        process = await manager.start()
        reader, writer = await manager.connect(Ready())
        await manager.until("ProcessStarted", "Hello", "Ready")
        writer.write(protocol.encode(Left(3)))
        writer.write_eof()  # as `Membership.close` does: half-closed, until the manager closes
        for number in range(1, 100):
            manager.workers.say("w", protocol.as_json(Generation(number, ("w",))))
        async with asyncio.timeout(20):
            assert (await reader.read()).count(b"\n") == 99
        writer.close()
        process.end(0)
        await manager.until("ProcessStarted", "Hello", "Ready", "Left", "ProcessEnded")

    play(scene)


def test_one_that_connected_just_before_it_ended_is_heard() -> None:
    async def scene(manager: Managed) -> None:
        process = await manager.start()
        process.end(1)
        _, writer = await manager.connect(Failed("ValueError: no", "Traceback"))
        writer.close()
        await manager.until("ProcessStarted", "Hello", "Failed", "ProcessEnded")
        last = manager.events[-1]
        assert isinstance(last, processes.ProcessEnded)
        assert last.worker.spoke

    play(scene)


def test_a_worker_that_is_faster_than_its_launcher_is_heard_when_it_has_started() -> None:
    async def scene(manager: Managed) -> None:
        answer: asyncio.Future[MadeUp] = asyncio.get_running_loop().create_future()

        async def launched() -> MadeUp:
            return await answer

        worker = manager.workers.start("w", launched())
        await manager.connect(Ready())
        await asyncio.sleep(0.05)
        assert manager.events == []
        answer.set_result(MadeUp())
        await worker.is_up.wait()
        await manager.until("ProcessStarted", "Hello", "Ready")

    play(scene)


def test_a_long_message_is_heard() -> None:
    async def scene(manager: Managed) -> None:
        await manager.start()
        await manager.connect(Failed("ValueError: no", "x" * 300_000))
        await manager.until("ProcessStarted", "Hello", "Failed")

    play(scene)


@pytest.mark.parametrize("line", [b"no json\n", b"[1]\n", b"x" * (processes.MOST_MESSAGE_BYTES + 1000)])
def test_nonsense_closes_the_channel_and_is_told(line: bytes) -> None:
    async def scene(manager: Managed) -> None:
        await manager.start()
        reader, writer = await manager.connect()
        writer.write(line)
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        await manager.until("ProcessStarted", "Hello", "ChannelFailed")

    play(scene)


def test_a_stranger_is_sent_away() -> None:
    async def scene(manager: Managed) -> None:
        reader, _ = await manager.connect(Ready())
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        assert manager.events == []

    play(scene)


def test_one_that_connects_late_gets_the_newest_generation_only() -> None:
    async def scene(manager: Managed) -> None:
        await manager.start()
        for message in (Generation(1, ("w",)), Generation(2, ("w",)), Go(1, ("here",)), Generation(1, ())):
            manager.workers.say("w", protocol.as_json(message))
        manager.workers.say("unknown", protocol.as_json(Generation(3, ())))
        reader, _ = await manager.connect()
        async with asyncio.timeout(20):
            assert protocol.decode(await reader.readline()) == Generation(2, ("w",))
        manager.workers.say("w", protocol.as_json(Go(2, ("here",))))
        async with asyncio.timeout(20):
            assert protocol.decode(await reader.readline()) == Go(2, ("here",))

    play(scene)


def test_one_that_is_stopped_while_it_starts_never_runs() -> None:
    async def scene(manager: Managed) -> None:
        worker = manager.workers.start("w", asyncio.sleep(1000, MadeUp()))
        manager.workers.stop("w")
        await worker.is_up.wait()
        assert manager.events == [processes.ProcessNotStarted(worker, None)]

    play(scene)


def test_one_that_had_started_when_it_was_stopped_is_killed() -> None:
    async def scene(manager: Managed) -> None:
        process = MadeUp()

        async def launched() -> MadeUp:
            return process

        worker = manager.workers.start("w", launched(), speaks=False)
        while not worker.ranks[0].starting.done():
            await asyncio.sleep(0)
        assert worker.processes == ()  # the launcher has answered, and nobody has looked at it
        manager.workers.stop("w")
        await manager.until("ProcessStarted", "ProcessEnded")
        assert process.signals == [SIGKILL]

    play(scene)


def test_the_error_of_one_that_cannot_be_started_is_told() -> None:
    async def scene(manager: Managed) -> None:
        async def launched() -> MadeUp:
            raise InputError("there is no folder")

        worker = manager.workers.start("w", launched())
        await worker.is_up.wait()
        (event,) = manager.events
        assert isinstance(event, processes.ProcessNotStarted)
        assert str(event.problem) == "there is no folder"
        assert "w" not in manager.workers

    play(scene)


def test_a_grace_can_be_made_shorter_and_not_longer() -> None:
    async def scene(manager: Managed) -> None:
        process = await manager.start(speaks=False)
        manager.workers.stop("w", 1000.0)
        manager.workers.stop("w", 2000.0)
        assert process.signals == [SIGTERM]
        manager.workers.stop("w", 0.01)
        await manager.until("ProcessStarted", "ProcessEnded")
        assert process.signals == [SIGTERM, SIGKILL]

    play(scene)


def test_only_one_that_has_connected_and_has_more_to_say_can_be_silent() -> None:
    async def scene(manager: Managed) -> None:
        manager.workers.silence_s = 0.1
        watching = asyncio.create_task(manager.workers.keep_watch())
        try:
            mute = await manager.start(MadeUp(deaf=True))
            await asyncio.sleep(0.3)
            assert mute.signals == []  # it imports, perhaps
            await manager.connect(Done(7))
            await manager.until("ProcessStarted", "Hello", "Done")
            await asyncio.sleep(0.3)
            assert mute.signals == []  # it saves the model
            mute.end(0)
            await manager.until("ProcessStarted", "Hello", "Done", "ProcessEnded")
            manager.events.clear()
            hung = await manager.start()
            _, writer = await manager.connect(Ready())
            manager.on_event = lambda event: writer.close() if isinstance(event, processes.WorkerSilent) else None
            await manager.until("ProcessStarted", "Hello", "Ready", "WorkerSilent", "ProcessEnded")
            assert hung.signals == [SIGKILL]
        finally:
            watching.cancel()

    play(scene)


def test_the_end_of_all_ends_those_that_are_started_again_too() -> None:
    async def scene(manager: Managed) -> None:
        again: list[MadeUp] = []

        async def launched() -> MadeUp:
            again.append(MadeUp())
            return again[-1]

        def restart(event: WorkerEvent) -> None:
            if isinstance(event, processes.ProcessEnded) and not again:
                manager.workers.start("w", launched(), speaks=False)
                again.append(MadeUp())

        await manager.start(speaks=False)
        manager.on_event = restart
        await asyncio.wait_for(manager.workers.close(), 20)
        assert manager.workers.running == ()
        assert manager.kinds[:2] == ["ProcessStarted", "ProcessEnded"]

    play(scene)


def test_a_worker_with_several_ranks_is_ready_when_all_are_and_each_rank_gets_every_message() -> None:
    async def scene(manager: Managed) -> None:
        await manager.start_ranks(2)
        readers = [(await manager.connect(Ready(), rank=rank))[0] for rank in (1, 0)]
        await manager.until("ProcessStarted", "Hello", "Ready")
        manager.workers.say("w", protocol.as_json(Generation(1, ("w",))))
        async with asyncio.timeout(20):
            assert [protocol.decode(await reader.readline()) for reader in readers] == [Generation(1, ("w",))] * 2

    play(scene)


def test_a_rank_that_crashes_takes_its_siblings_with_it_and_its_status_counts() -> None:
    async def scene(manager: Managed) -> None:
        first, second, third = await manager.start_ranks(3)
        for rank in range(3):
            await manager.connect(Ready(), rank=rank)
        await manager.until("ProcessStarted", "Hello", "Ready")
        second.end(7)
        for writer in manager.writers:
            writer.close()
        await manager.until("ProcessStarted", "Hello", "Ready", "ProcessEnded")
        last = manager.events[-1]
        assert isinstance(last, processes.ProcessEnded)
        assert (last.status, last.worker.culprit_rank) == (7, 1)
        assert first.signals == third.signals == [SIGKILL]

    play(scene)


def test_a_rank_that_is_done_does_not_end_its_siblings() -> None:
    async def scene(manager: Managed) -> None:
        first, second = await manager.start_ranks(2)
        (_, one), (_, other) = [await manager.connect(Ready(), rank=rank) for rank in range(2)]
        await manager.until("ProcessStarted", "Hello", "Ready")
        one.write(protocol.encode(Done(5)))
        one.close()
        first.end(0)
        await asyncio.sleep(0.05)
        other.write(protocol.encode(Done(5)))
        other.close()
        second.end(0)
        await manager.until("ProcessStarted", "Hello", "Ready", "Done", "ProcessEnded")
        last = manager.events[-1]
        assert isinstance(last, processes.ProcessEnded)
        assert (last.status, first.signals, second.signals) == (0, [], [])

    play(scene)


def test_a_rank_that_ends_because_its_node_is_taken_leaves_its_siblings_the_time_to_save() -> None:
    async def scene(manager: Managed) -> None:
        first, second = await manager.start_ranks(2)
        channels = [await manager.connect(Ready(), rank=rank) for rank in range(2)]
        await manager.until("ProcessStarted", "Hello", "Ready")
        manager.workers.say("w", protocol.as_json(Taken(5.0)))
        async with asyncio.timeout(20):
            assert [protocol.decode(await reader.readline()) for reader, _ in channels] == [Taken(5.0)] * 2
        channels[1][1].close()
        second.end(143)
        worker = manager.workers["w"]
        async with asyncio.timeout(20):
            while worker.ranks[1].status is None:
                await asyncio.sleep(0.01)
            await asyncio.wait([channel for rank in worker.ranks[1:] if (channel := rank.channel) is not None])
        await asyncio.sleep(0.05)
        assert first.signals == []  # it is saving
        channels[0][1].close()
        first.end(143)
        await manager.until("ProcessStarted", "Hello", "Ready", "ProcessEnded")
        last = manager.events[-1]
        assert isinstance(last, processes.ProcessEnded)
        assert (last.status, first.signals) == (143, [])

    play(scene)


def test_a_silent_rank_ends_the_whole_worker() -> None:
    async def scene(manager: Managed) -> None:
        first, second = await manager.start_ranks(2)
        manager.workers.silence_s = 0.2
        watch = asyncio.create_task(manager.workers.keep_watch())
        _, speaking = await manager.connect(Ready(), rank=0)
        await manager.connect(Ready(), rank=1)
        async with asyncio.timeout(20):
            while "WorkerSilent" not in manager.kinds:
                speaking.write(protocol.encode(Ready()))
                await asyncio.sleep(0.02)
        watch.cancel()
        assert first.signals == second.signals == [SIGKILL]

    play(scene)


def test_a_worker_of_which_one_rank_cannot_be_started_is_not_started() -> None:
    async def scene(manager: Managed) -> None:
        process = MadeUp()

        async def launched() -> MadeUp:
            return process

        async def refused() -> MadeUp:
            raise InputError("there is no folder")

        worker = manager.workers.start("w", launched(), refused())
        await worker.is_up.wait()
        (event,) = manager.events
        assert isinstance(event, processes.ProcessNotStarted)
        assert str(event.problem) == "there is no folder"
        assert process.signals == [SIGKILL]

    play(scene)


def test_a_rank_that_the_worker_does_not_have_is_sent_away() -> None:
    async def scene(manager: Managed) -> None:
        await manager.start_ranks(2)
        reader, _ = await manager.connect(rank=2)
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        await manager.until("ProcessStarted")

    play(scene)


def test_processes_that_do_not_know_of_ranks_are_refused_with_what_to_do() -> None:
    async def scene(manager: Managed) -> None:
        first, second = await manager.start_ranks(2)
        await manager.connect(Ready())
        await manager.until("ProcessStarted", "Hello")
        await manager.connect(Ready())  # also says that it is rank 0, as version 0.1.0 does
        async with asyncio.timeout(20):
            while "Failed" not in manager.kinds:
                await asyncio.sleep(0.005)
        (failed,) = (event.message for event in manager.events if isinstance(getattr(event, "message", None), Failed))
        assert failed.error.endswith("Upgrade it, or submit with --ranks-per-node 1")
        assert first.signals == second.signals == [SIGKILL]

    play(scene)


def test_a_rank_that_obeys_the_order_to_stop_leaves_the_others_their_time() -> None:
    async def scene(manager: Managed) -> None:
        first, second = await manager.start_ranks(2)
        for rank in range(2):
            await manager.connect(Ready(), rank=rank)
        await manager.until("ProcessStarted", "Hello", "Ready")
        manager.workers.stop("w", 100.0)
        first.end(143)
        manager.writers[0].close()
        await asyncio.sleep(0.1)
        assert second.signals == [SIGTERM]
        second.end(143)
        manager.writers[1].close()
        await manager.until("ProcessStarted", "Hello", "Ready", "ProcessEnded")

    play(scene)


def test_a_rank_that_fails_after_training_is_the_one_to_blame() -> None:
    async def scene(manager: Managed) -> None:
        first, second = await manager.start_ranks(2)
        for rank in range(2):
            await manager.connect(Ready(), Done(5), rank=rank)
        await manager.until("ProcessStarted", "Hello", "Ready", "Done")
        for writer in manager.writers:
            writer.close()
        first.end(0)
        second.end(5)
        await manager.until("ProcessStarted", "Hello", "Ready", "Done", "ProcessEnded")
        last = manager.events[-1]
        assert isinstance(last, processes.ProcessEnded)
        assert (last.status, last.worker.culprit_rank) == (5, 1)

    play(scene)
