"""The loop of the engine: requests come in through a queue, and one thread computes the steps of its core."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from vishwamai.core.errors import DeviceError
from vishwamai.inference.answers import Delta, Finish
from vishwamai.inference.core import EngineCore
from vishwamai.inference.prompts import Prompts
from vishwamai.inference.requests import Request
from vishwamai.inference.sampling import Sampling
from vishwamai.inference.threads import roomy_stack


class EngineLoop:
    """What any thread may call, and the thread of the steps. Without `start`, each caller of `step` runs the loop.

    Args:
      core: requests, their scheduler and the programs of their steps.
      prompts: checks of requests.

    Attributes:
      sleeping: level of `Engine.sleep`, 0 while requests are accepted.
      failure: text of the error that ended the loop, or None.
      on_failure: callable without arguments, called on the engine's thread once `failure` is set; or None.
      pending: number of answers handed in, and not taken from the queue yet.
    """

    def __init__(self, core: EngineCore, prompts: Prompts):
        self.core, self.prompts, self.scheduler = core, prompts, core.scheduler
        self.sleeping = 0
        self._idle_work: list[tuple[Callable[[], None], concurrent.futures.Future[None]]] = []
        self.failure: str | None = None
        self.on_failure: Callable[[], None] | None = None
        self._inbox: queue.SimpleQueue[tuple[Callable[[Any], None], Any] | None] = queue.SimpleQueue()
        self.pending = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def unfinished(self) -> int:
        """Answers that wait or run."""
        return self.scheduler.unfinished + self.pending

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.pending == 0 and self.core.idle

    def check(self, prompt: Sequence[int], options: Sampling) -> int:
        """The length that each answer's sequence may reach, prompt included; see `Prompts.check`."""
        return self.prompts.check(prompt, options)

    def submit(self, request: Request) -> None:
        """Hands a request in; its sink is called until every answer has ended.

        Raises:
          ShapeError: it cannot be served.
          DeviceError: the engine has failed, or sleeps.
        """
        self.check(request.prompt, request.options)
        if self.failure is not None:
            raise DeviceError(f"the engine has stopped: {self.failure}; start it again.")
        with self._lock:
            self._check_awake()
            self.pending += request.options.n
        self._inbox.put((self._take, request))

    def cancel(self, request: Request) -> None:
        """Ends a request: its pages are free before the next step."""
        self._inbox.put((self._cancel, request))

    def start(self) -> None:
        """Runs the loop on a thread of its own."""
        if self._thread is None:
            with roomy_stack():  # grammars are copied and freed there
                self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Ends the loop; requests that are not answered end as cancelled. With `tiers`, prefixes are stored."""
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()
            self._thread = None
            self._abandon("cancelled")
        if self.failure is None:
            self.core.store_prefixes()

    def _run(self) -> None:
        try:
            while True:
                if self._idle_work and self.idle:
                    work, result = self._idle_work.pop(0)
                    try:
                        result.set_result(work())
                    except Exception as error:  # of the caller of `sleep` or `wake`
                        result.set_exception(error)
                if self.idle and not self._idle_work and not self._receive(wait=True):
                    break
                if not self.step():
                    break
            self._abandon("cancelled")
        except Exception as error:  # what cannot be a request's: every client is told
            self.failure = f"{type(error).__name__}: {error}"
            self._abandon("error")
            if self.on_failure is not None:
                self.on_failure()
            raise

    def _abandon(self, finish: Finish) -> None:
        """Ends all answers, and those of requests that nobody took from the queue."""
        self.core.abandon(finish, self.failure)
        for _, result in self._idle_work:
            result.cancel()
        self._idle_work.clear()
        while not self._inbox.empty():
            item = self._inbox.get()
            if item is not None and item[0] == self._idle_work.append:
                item[1][1].cancel()
            if item is None or item[0] != self._take:
                continue
            for choice in range(item[1].options.n):
                item[1].sink(Delta(choice, finish=finish, error=self.failure))
            with self._lock:
                self.pending -= item[1].options.n

    def step(self) -> bool:
        """One turn of the loop; False once it has been told to stop."""
        if not self._receive():
            return False
        self.core.step()
        return True

    def _receive(self, wait: bool = False) -> bool:
        """Does what was handed in; False if that is to stop."""
        try:
            while True:
                item = self._inbox.get(block=wait)
                wait = False
                if item is None:
                    return False
                do, argument = item
                do(argument)
        except queue.Empty:
            return True

    def _take(self, request: Request) -> None:
        self.core.take(request, self.check(request.prompt, request.options))
        with self._lock:
            self.pending -= request.options.n

    def _cancel(self, request: Request) -> None:
        self.core.cancel(request)

    def _check_awake(self) -> None:
        if self.sleeping:
            raise DeviceError("the engine sleeps; call `wake()` (POST /wake_up) first.")

    def _when_idle(self, work: Callable[[], None]) -> None:
        """Does something once every answer has ended, on the thread of the loop where there is one."""
        if self._thread is None:
            while not self.idle:
                self.step()
            work()
            return
        result: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._inbox.put((self._idle_work.append, (work, result)))
        try:
            if self.failure is None:  # else nobody takes it from the queue
                result.result()
        except concurrent.futures.CancelledError:
            pass
        if not result.done() or result.cancelled():
            raise DeviceError(f"the engine has stopped: {self.failure or 'its loop has ended'}; start it again.")
