"""What the reader of a stream sees, from a thread and from an event loop."""

import asyncio
import threading

import pytest

from strata_mlx import Fault
from strata_mlx.server.jobs import End, Job, Piece, Token, Usage
from strata_mlx.server.streams import Item, Stream

JOB = Job((1, 2, 3), 5)
END = End("length", None, Usage(3))
PATIENCE = 30


async def read(stream: Stream) -> list[Item]:
    return [item async for item in stream]


def test_what_has_gathered_comes_as_one_piece_and_ends_with_the_end() -> None:
    stream = Stream(JOB)
    first, second = Token(1, "a", -0.1), Token(2, "b", -0.2)
    for item in (Piece("a", (first,)), Piece("b", (second,)), END):
        stream.put(item)
    assert list(stream) == [Piece("ab", (first, second)), END]
    assert list(stream) == []


def test_nothing_follows_an_end() -> None:
    stream = Stream(JOB)
    for item in (END, Piece("more"), Fault("late")):
        stream.put(item)
    assert list(stream) == [END]


def test_a_fault_is_raised_after_the_text_before_it() -> None:
    stream = Stream(JOB)
    stream.put(Piece("some"))
    stream.put(Fault("the disk has gone"))
    items = iter(stream)
    assert next(items) == Piece("some")
    with pytest.raises(Fault, match="the disk has gone"):
        next(items)
    assert list(stream) == []


def test_a_loop_waits_for_what_another_thread_gives() -> None:
    stream = Stream(JOB)

    async def main() -> list[Item]:
        reading = asyncio.create_task(read(stream))
        await asyncio.sleep(0)  # it waits now

        def give() -> None:
            for number in range(100):
                stream.put(Piece(f"{number} "))
            stream.put(END)

        thread = threading.Thread(target=give)
        thread.start()
        items = await asyncio.wait_for(reading, PATIENCE)
        thread.join(PATIENCE)
        return items

    *pieces, end = asyncio.run(main())
    assert "".join(piece.text for piece in pieces if isinstance(piece, Piece)).split() == [str(n) for n in range(100)]
    assert end == END


def test_a_fault_reaches_a_loop_that_waits() -> None:
    stream = Stream(JOB)

    async def main() -> None:
        reading = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        threading.Thread(target=stream.put, args=(Fault("no"),)).start()
        await asyncio.wait_for(reading, PATIENCE)

    with pytest.raises(Fault, match="no"):
        asyncio.run(main())


def test_a_reader_that_was_cancelled_or_whose_loop_is_closed_disturbs_nobody() -> None:
    stream = Stream(JOB)

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(stream.__anext__(), 0.001)

    asyncio.run(main())
    stream.put(Piece("to nobody"))
    stream.cancel()
    assert stream.cancelled
    assert asyncio.run(read_one(stream)) == Piece("to nobody")


async def read_one(stream: Stream) -> Item:
    return await stream.__anext__()
