"""Dispatching requests to servers: many at a time, and to the others if one fails."""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.errors import UserError, say
from common.sampling.generate import Sampled
from common.sampling.server_client import SamplingParams, Server, ServerFault, ServerTimeout

AT_ONCE = 64  # concurrent requests per process
PATIENCE = 300.0  # seconds within which a server has to return some completion,
PATIENCE_PER_TOKEN = 0.1  # plus this per token that one may have
PAUSES = (1.0, 2.0, 4.0)  # seconds before each retry with the last remaining server
LONGEST_SECONDS = 24 * 3600.0  # time limit for one completion


class Request(NamedTuple):
    """A completion to sample."""

    prompt: Sequence[int]
    seed: int
    limit: int  # maximum number of tokens


def request_seed(key: Sequence[int]) -> int:
    """63 bits from a key, the same in any process: a completion is drawn alike by any server, and when repeated."""
    text = ",".join(str(int(part)) for part in key)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class Dispatch:
    """Requests distributed over servers. If one fails, the others take over its requests; the last one is retried."""

    def __init__(
        self,
        requests: Sequence[Request],
        assigned: Sequence[Server],
        servers: Sequence[Server],
        stop_ids: Sequence[int],
        params: SamplingParams,
        none_left: Callable[[dict[str, str]], UserError],
    ):
        """assigned: the server of each request while it works; an idle server takes over requests of the others. none_left:
        makes the error to raise from the reason of each failure."""
        self.requests, self.stop_ids, self.params, self.none_left = requests, stop_ids, params, none_left
        self.results: list[Sampled | None] = [None] * len(requests)
        self.by: list[Server | None] = [None] * len(requests)  # the server that sampled each
        self.failed: dict[str, str] = {}  # {address of a server: why}
        self.waiting: dict[Server, deque[int]] = {server: deque() for server in servers}
        self.under_way = dict.fromkeys(servers, 0)
        for i, server in enumerate(assigned):
            self.waiting[server].append(i)
        self.left = len(requests)
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self.is_said = False  # that the last one is being retried

    def run(self) -> list[Sampled]:
        """The completions. Raises UserError if one is refused, or no server is left."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(AT_ONCE, self.left))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        return [result for result in self.results if result is not None]

    def again(self, server: Server, reason: str) -> None:
        """Discard what a server has sampled, for the others to sample again."""
        with self.changed:
            self._give_up(server, reason)
            for i in [i for i, by in enumerate(self.by) if by is server]:
                self.results[i] = self.by[i] = None
                self.left += 1
                self._put_back(i)

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            i, server = taken
            try:
                result = self._ask(self.requests[i], server)
                with self.changed:
                    self.results[i], self.by[i] = result, server
                    self.left -= 1
            except ServerFault:
                with self.changed:
                    self._put_back(i)
            except BaseException as error:  # in a thread: re-raised where the completions are awaited
                with self.changed:
                    self.error = self.error or error
            with self.changed:
                self.under_way[server] -= 1
                self.changed.notify_all()

    def _ask(self, request: Request, server: Server) -> Sampled:
        """Sample a completion. Raises ServerFault when giving up on the server: immediately if there are others."""
        for pause in (*PAUSES, None):
            try:
                return server.complete(
                    request.prompt,
                    request.seed,
                    request.limit,
                    self.stop_ids,
                    self.params,
                    seconds=LONGEST_SECONDS,
                    go_on=self._watch(server, time.monotonic()),
                )
            except ServerFault as fault:
                with self.changed:
                    is_last = len(self.failed) == len(self.waiting) - 1 and server.url not in self.failed
                    if pause is None or isinstance(fault, ServerTimeout) or not is_last or self.error is not None:
                        if self.error is None:
                            self._give_up(server, str(fault))
                        raise
                    if not self.is_said:
                        say(f"{server.url} has failed ({fault}), no other is left: asked again, {len(PAUSES)} times at most")
                    self.is_said = True
                    self.changed.wait_for(lambda: self.error is not None, pause)

    def _take(self) -> tuple[int, Server] | None:
        """The next request and its server; None when all are done. The least busy server takes one of its own, or one from
        the longest queue."""
        with self.changed:
            while True:
                if self.error is not None or not self.left:
                    return None
                alive = [server for server in self.waiting if server.url not in self.failed]
                if any(self.waiting.values()) and alive:
                    server = min(alive, key=lambda server: self.under_way[server])
                    queue = self.waiting[server] or max(self.waiting.values(), key=len)
                    self.under_way[server] += 1
                    return (queue.popleft() if queue is self.waiting[server] else queue.pop()), server
                self.changed.wait()

    def _watch(self, server: Server, begun: float) -> Callable[[], None]:
        """A check, called each second, that raises ServerFault once waiting is pointless."""

        def look() -> None:
            if self.error is not None:
                raise ServerTimeout("the rollout has ended")
            if server.url in self.failed:
                raise ServerTimeout(self.failed[server.url])
            patience = PATIENCE + PATIENCE_PER_TOKEN * max(request.limit for request in self.requests)
            silent = time.monotonic() - max(begun, server.answered)
            if silent > patience:
                raise ServerTimeout(f"it hangs: no completion in {silent:.0f} s")

        return look

    def _give_up(self, server: Server, reason: str) -> None:
        self.failed.setdefault(server.url, reason)
        server.close()
        if len(self.failed) == len(self.waiting):
            self.error = self.error or self.none_left(self.failed)

    def _put_back(self, i: int) -> None:
        alive = [server for server in self.waiting if server.url not in self.failed]
        if alive:
            shortest = min(alive, key=lambda server: len(self.waiting[server]))
            self.waiting[shortest].appendleft(i)
