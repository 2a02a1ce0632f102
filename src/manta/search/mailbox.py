"""How a trial's process and its workers talk. Apart from the rest, because an actor's process imports its module."""

import asyncio
from typing import Any


class Mailbox:
    """Between a trial's process and rank 0 of its workers: a queue each way. An asyncio actor."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[Any]] = {"up": asyncio.Queue(), "down": asyncio.Queue()}

    async def put(self, way: str, what: Any) -> None:
        await self._queues[way].put(what)

    async def get(self, way: str) -> Any:
        return await self._queues[way].get()
