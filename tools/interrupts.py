"""Interrupts commands of an installed package at random moments: `tools/first_hour.py` calls this.

A moment is drawn from when the command takes SIGTERM (before, Python itself is starting) to when it would end, and
the signal is SIGINT or SIGTERM. Checked each time: the exit status is the documented one, nothing prints a traceback,
no process is left, what was written can be read. At the end the same command goes on, and ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
LONGEST = 300.0
"""Seconds after which a command counts as hanging."""

PATIENCE = 10.0
"""Seconds that its processes have to end after it."""


class Failed(Exception):
    """What an interrupted command did wrong, with what it said."""


@dataclasses.dataclass
class Running:
    """A command as a process group of its own, in a directory of its own."""

    words: list[str]
    folder: Path
    around: dict[str, str]
    process: subprocess.Popen[bytes] = dataclasses.field(init=False)
    start: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.start = time.monotonic()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                self.words, cwd=self.folder, env=self.around, stdout=log, stderr=log, start_new_session=True
            )
        while self.process.poll() is None and not takes_signals(self.process.pid):
            time.sleep(0.01)

    @property
    def log(self) -> Path:
        return self.folder / "said.txt"

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def running_after(self, seconds: float) -> bool:
        """Whether it still runs after so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is None

    def end(self) -> int:
        """Waits for it to end; its status.

        Raises:
          Failed: it hangs, prints a traceback, or leaves processes.
        """
        try:
            status = self.process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise self.failure(f"it did not end within {LONGEST:.0f} s") from None
        for sign in ("Traceback", "Exception ignored", "terminate called"):
            if sign in self.output():
                raise self.failure(f"it printed {sign!r}")
        end = time.monotonic() + PATIENCE
        while members(self.process.pid):
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        else:
            return status
        os.killpg(self.process.pid, signal.SIGKILL)
        raise self.failure("it left processes")

    def failure(self, problem: str) -> Failed:
        return Failed(f"{' '.join(self.words)}\n{problem}; it said:\n{self.output()[-3000:]}")


def takes_signals(pid: int) -> bool:
    """Whether a process handles SIGTERM by now, by Linux's /proc."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def members(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                pids.append(int(path.parent.name))
    return pids


@dataclasses.dataclass(frozen=True)
class Command:
    """A command that goes on after an interrupt.

    Attributes:
      words: the command.
      resume: arguments that are added where it goes on and its directory has the result file.
      readable: raises where what was written cannot be read.
      end_text: text of its output at its end.
    """

    name: str
    words: list[str]
    resume: tuple[str, ...]
    result_file: str
    readable: Callable[[Path], None]
    end_text: str

    def start(self, folder: Path, around: dict[str, str]) -> Running:
        exists = (folder / self.result_file).exists()
        return Running([*self.words, *(self.resume if exists else ())], folder, around)


def interrupt(command: Command, folder: Path, around: dict[str, str], chance: random.Random, seconds: float) -> str:
    """Interrupts a command once; what happened, in words.

    Raises:
      Failed: something of what this file promises does not hold.
    """
    number, moment = chance.choice(SIGNALS), chance.uniform(0, seconds)
    running = command.start(folder, around)
    sent = running.running_after(moment)
    if sent:
        running.process.send_signal(number)
    status = running.end()
    output = running.output()
    finished = command.end_text in output and status in (0, -number)  # the signal came when it had done its work
    if not (finished or (sent and status == STATUS[number])):
        raise running.failure(f"{number.name} after {moment:.2f} s: it ended with status {status}")
    command.readable(folder)
    return f"{command.name}: {number.name} after {moment:.2f} s, {'ended before' if finished else f'status {status}'}"


def trials(command: Command, folder: Path, around: dict[str, str], count: int, chance: random.Random) -> Iterator[str]:
    """Runs a command whole, then interrupts it, goes on and interrupts that, and at last goes on to the end."""
    uninterrupted = command.start(folder / "whole", around)
    _must_end(uninterrupted, command)
    seconds = time.monotonic() - uninterrupted.start
    yield f"{command.name}: {seconds:.1f} s without an interrupt"
    place = folder / "0"
    for i in range(count):
        outcome = interrupt(command, place, around, chance, seconds)
        yield outcome
        if i % 2 and i + 1 < count or "ended before" in outcome:  # every other one goes on from an interrupt
            place = folder / str(i + 1)
    _must_end(command.start(place, around), command)
    command.readable(place)
    yield f"{command.name}: went on, and ended"


def _must_end(running: Running, command: Command) -> None:
    status = running.end()
    if status != 0 or command.end_text not in running.output():
        raise running.failure(f"it ended with status {status}")


def read_all_json(folder: Path) -> None:
    """Every JSON file of a directory can be read, and no temporary is left."""
    for path in folder.rglob("*.json"):
        json.loads(path.read_text(encoding="utf-8"))
    left = list(folder.rglob(".vishwamai-*"))
    if left:
        raise Failed(f"temporaries are left: {left}")


def read_run(folder: Path) -> None:
    """A training run's records are those of consecutive steps."""
    records = folder / "run" / "metrics.jsonl"
    if records.exists():
        steps = [json.loads(line)["step"] for line in records.read_text(encoding="utf-8").splitlines()]
        if steps != list(range(1, len(steps) + 1)):
            raise Failed(f"{records} has the steps {steps}")


def commands(vishwamai: str, config: Path) -> list[Command]:
    """`bench`, `tune` and `train`, small."""
    small = ["--quick", "--ops", "norm,softmax", "--target", "none", "--no-model"]
    bench = [vishwamai, "bench", *small, "--json", "r.json", "--report", "r.html"]
    tune = [vishwamai, "tune", "--quick", "--ops", "norm", "--directory", "tables"]
    train = [vishwamai, "train", str(config), "--output", "run"]
    return [
        Command("bench", bench, ("--resume",), "r.json", read_all_json, "wrote r.json"),
        Command("tune", tune, (), "tables", read_all_json, "searched, "),
        Command("train", train, ("--resume",), "run", read_run, "Done in"),
    ]


def serve_trials(
    vishwamai: str, model: Path, folder: Path, around: dict[str, str], count: int, chance: random.Random
) -> Iterator[str]:
    """Interrupts a server while it loads, waits or answers; a new one then answers."""
    first = _Server(vishwamai, model, folder, around)
    first.until_ready()
    seconds = time.monotonic() - first.running.start
    yield f"serve: ready after {seconds:.1f} s; {first.stop(signal.SIGTERM, {0})}"  # no server lives while it yields
    for _ in range(count):
        number, moment = chance.choice(SIGNALS), chance.uniform(0, seconds + 2)
        server = _Server(vishwamai, model, folder, around)
        asking = threading.Thread(target=server.ask_all_the_time, daemon=True)
        asking.start()
        if not server.running.running_after(moment):
            raise server.running.failure("it ended by itself")
        # SIGTERM lets answers end, where it serves already.
        ends = server.stop(number, {STATUS[number], 0} if number == signal.SIGTERM else {STATUS[number]})
        yield f"after {moment:.2f} s, {ends}"
        asking.join(LONGEST)
    last = _Server(vishwamai, model, folder, around)
    last.until_ready()
    if last.ask() != 200:
        raise last.running.failure("a server that was started again does not answer")
    yield f"started again and answered; {last.stop(signal.SIGINT, {130})}"


class _Server:
    """`vishwamai serve` of a small model on a free port."""

    def __init__(self, vishwamai: str, model: Path, folder: Path, around: dict[str, str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        sizes = ["--dtype", "float32", "--max-length", "64", "--step-tokens", "32", "--max-sequences", "2"]
        self.running = Running([vishwamai, "serve", str(model), "--port", str(port), *sizes], folder, around)

    def until_ready(self) -> None:
        end = time.monotonic() + LONGEST
        while self._status("/ready") != 200:
            if self.running.process.poll() is not None or time.monotonic() > end:
                os.killpg(self.running.process.pid, signal.SIGKILL)
                raise self.running.failure("it did not become ready")
            time.sleep(0.05)

    def _status(self, path: str, body: bytes | None = None) -> int:
        """The status of a request; 0 where nobody answers."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except (OSError, http.client.HTTPException):
            return 0

    def ask(self) -> int:
        return self._status("/v1/completions", json.dumps({"prompt": "x", "max_tokens": 16}).encode())

    def ask_all_the_time(self) -> None:
        while self.running.process.poll() is None:
            if self.ask() == 0:
                time.sleep(0.05)

    def stop(self, number: signal.Signals, allowed: set[int]) -> str:
        self.running.process.send_signal(number)
        status = self.running.end()
        if status not in allowed:
            raise self.running.failure(f"{number.name}: it ended with status {status}, not {sorted(allowed)}")
        return f"serve: {number.name}, status {status}"


if __name__ == "__main__":
    sys.exit("interrupts: tools/first_hour.py calls this file")
