"""Agents whose workers print without pause; `benchmarks/controller.py --flood` runs it as a process of its own.

Each connection sends the next piece of output, as large as agents send them, at the acknowledgement of the last one.
A line on stdin ends it. It then prints, as JSON, how many pieces and bytes were acknowledged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from websockets.asyncio.client import connect

from bftrainer.cluster.wire import codec, messages
from bftrainer.cluster.wire.messages import Beat, Join, Log, Logged
from bftrainer.processes.log_tail import MOST_MESSAGE_BYTES

LINE = "epoch 1 step 12345\n"
TEXT = LINE * (MOST_MESSAGE_BYTES // len(LINE))
BEAT_S = 1.0


class Flood:
    """All connections, and what was acknowledged."""

    def __init__(self, url: str, secret: str) -> None:
        self._url = url.replace("http", "ws", 1) + messages.PATH
        self._headers = {"Authorization": f"Bearer {secret}"}
        self.pieces = self.acknowledged = 0

    async def run(self, number: int) -> None:
        """One agent with one worker."""
        worker = f"t{number}-1"
        async with connect(
            self._url, additional_headers=self._headers, ping_interval=None, compression=None, proxy=None
        ) as connection:
            await connection.send(codec.encode(Join(f"flood-{number}", "127.0.0.1", f"agent-{number}")))
            await connection.send(codec.encode(Log(worker, 0, TEXT, len(TEXT))))
            beating = asyncio.create_task(self._beat(connection))
            try:
                async for frame in connection:
                    message = codec.decode(frame)
                    if isinstance(message, Logged):
                        self.pieces += 1
                        self.acknowledged += len(TEXT)
                        await connection.send(codec.encode(Log(worker, message.offset, TEXT, len(TEXT))))
            finally:
                beating.cancel()

    async def _beat(self, connection: object) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await connection.send(codec.encode(Beat()))  # type: ignore[attr-defined]


async def play(state: str, connections: int) -> None:
    """Flood until stdin says so."""
    url = json.loads(Path(state, "client.json").read_text())["url"]
    flood = Flood(url, Path(state, "agent-secret").read_text().strip())
    tasks = [asyncio.create_task(flood.run(number + 1)) for number in range(connections)]
    await asyncio.to_thread(sys.stdin.readline)
    print(json.dumps({"pieces": flood.pieces, "bytes": flood.acknowledged, "ended": sum(t.done() for t in tasks)}))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    """Read the arguments and flood."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", required=True)
    parser.add_argument("--connections", type=int, required=True)
    args = parser.parse_args()
    asyncio.run(play(args.state, args.connections))


if __name__ == "__main__":
    main()
