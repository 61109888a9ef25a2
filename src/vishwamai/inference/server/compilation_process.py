"""The process that tries grammars out: it reads the tokenizer once, and forks for each grammar.

Each line of its input is a JSON object: first `{"tokenizer", "vocab", "end", "limits", "memory", "cpu", "stack"}`, then
`{"id", "text"}` to try a grammar or `{"id"}` to end a trial. Each line of its output is the end of a trial: `{"id",
"error", "bytes"}`, or `{"id", "signal"}` where the trial did not live to say more. It imports nothing of vishwamai, so
that it starts fast and has one thread.
"""

import ctypes
import json
import os
import resource
import selectors
import signal
import sys

import llguidance


class _Malloc(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def allocated() -> int:
    """Bytes that the process has allocated, by glibc; 0 elsewhere."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    function.restype = _Malloc
    info = function()
    return info.uordblks + info.hblkhd


def address_space() -> int | None:
    """Bytes of the process's address space, where /proc tells it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def limit(settings: dict) -> None:
    """Bounds what this process may use from now on."""
    space = address_space()
    if space is not None:
        resource.setrlimit(resource.RLIMIT_AS, (space + settings["memory"],) * 2)
    seconds = int(settings["cpu"])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack = settings["stack"] if hard == resource.RLIM_INFINITY else min(settings["stack"], hard)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(2 * seconds)
    os.nice(10)  # answers come first


def attempt(tokenizer: llguidance.LLTokenizer, text: str, limits: dict) -> dict:
    """Compiles a grammar and computes its first mask."""
    before = allocated()
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=llguidance.LLParserLimits(**limits))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return {"error": matcher.get_error()[:4000] if matcher.is_error() else None, "bytes": allocated() - before}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, whose end closes the input
    source, output = 0, sys.stdout.buffer
    parts: list[bytes] = []
    while b"\n" not in (part := os.read(source, 1 << 20)):
        if not part:
            return
        parts.append(part)
    last, _, text = part.partition(b"\n")  # read by hand: `select` does not see what a file has read ahead
    settings = json.loads(b"".join([*parts, last]))
    end = list(settings["end"])
    tokenizer = llguidance.LLTokenizer(settings.pop("tokenizer"), n_vocab=settings["vocab"], eos_token=end)
    selector = selectors.DefaultSelector()
    selector.register(source, selectors.EVENT_READ)
    trials: dict[int, tuple[int, int]] = {}  # by the descriptor of its pipe: the request's id, and the process

    def say(message: dict) -> None:
        output.write(json.dumps(message).encode() + b"\n")
        output.flush()

    def begin(request: dict) -> None:
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                limit(settings)
                result = attempt(tokenizer, request["text"], settings["limits"])
                os.write(writing, json.dumps(result).encode())  # fewer bytes than a pipe holds
            finally:
                os._exit(0)
        os.close(writing)
        trials[reading] = (request["id"], process)
        selector.register(reading, selectors.EVENT_READ)

    def finish(descriptor: int) -> None:
        answer = os.read(descriptor, 1 << 16)
        selector.unregister(descriptor)
        os.close(descriptor)
        request, process = trials.pop(descriptor)
        status = os.waitpid(process, 0)[1]
        say({"id": request, **(json.loads(answer) if answer else {"signal": os.WTERMSIG(status)})})

    def take(part: bytes) -> bytes:
        """Does what complete lines ask for; the rest."""
        *lines, rest = part.split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "text" in request:
                begin(request)
                continue
            for number, process in trials.values():
                if number == request["id"]:
                    os.kill(process, signal.SIGKILL)
        return rest

    text = take(text)
    while True:
        for key, _ in selector.select():
            if key.fd != source:
                finish(key.fd)
                continue
            part = os.read(source, 1 << 16)
            if not part:
                for _, process in trials.values():
                    os.kill(process, signal.SIGKILL)
                return
            text = take(text + part)


main()
