"""Gets the final bundles of a job out of libtpu, and keeps them on disk.

A job is compiled in a process of its own (`vishwamai.aot.schedule.worker`), and what the analysis needs of the dump is
kept under the job's fingerprint, compressed; the next call with the same program reads it from there.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vishwamai.aot.compile import child, libtpu
from vishwamai.aot.compile.diagnose import CompilerProblem, as_error
from vishwamai.aot.schedule.job import Job
from vishwamai.aot.schedule.simulate import Source
from vishwamai.core import caches
from vishwamai.core.errors import DeviceError, KernelError, VishwamaiError
from vishwamai.core.hardware import TpuChip
from vishwamai.core.target import Target


@dataclasses.dataclass(frozen=True)
class Dump:
    """What the compiler made of a job: the text of every program, and what the executable takes (as `Compiled` names
    it).

    `twins`: a fingerprint by instruction; those with the same one share one program's code.
    """

    chip: TpuChip
    sources: Mapping[str, Source]
    memory: Mapping[str, int]
    cost: Mapping[str, float | None]
    kernels: Sequence[Mapping[str, Any]]
    twins: Mapping[str, str]
    warning: str | None


def dump_flags(directory: pathlib.Path) -> str:
    """Options under which libtpu writes the programs that it makes into a directory."""
    return " ".join(
        (
            f"--xla_jf_dump_to={directory}",
            "--xla_jf_dump_hlo_text=true",
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_dump_llo_html=false",
            "--xla_jf_emit_annotations=true",
            "--xla_jf_dump_llo_pass_label_regex=.*final.*",
        )
    )


_BUNDLES = re.compile(r"(\d+)-(.*)-\d+-final_bundles\.txt")


def read_sources(directory: pathlib.Path) -> dict[str, Source]:
    """The programs of a dump directory; of programs that were compiled twice, the last."""
    sources: dict[str, Source] = {}
    for file in sorted(directory.glob("*final_bundles.txt*")):
        match = _BUNDLES.match(file.name)
        if match is None or "schedule-analysis" in file.name:
            continue
        stamp, name = match[1], match[2]
        units = [
            f
            for f in directory.iterdir()
            if f.name.startswith(f"{stamp}-{name}-") and "per-bundle-utilization" in f.name
        ]
        sources[name] = Source(_text(file), _text(units[0]) if units else "")
    return sources


def _text(file: pathlib.Path) -> str:
    data = file.read_bytes()
    return (gzip.decompress(data) if file.suffix == ".gz" else data).decode(errors="replace")


def _keep(work: pathlib.Path, entry: pathlib.Path, spare: pathlib.Path) -> pathlib.Path:
    """Moves what the analysis reads of a finished job into the cache, compressed, all at once; into `spare` where the
    cache cannot be written.

    Returns:
        the directory that has it.
    """
    try:
        _pack(work, entry)
    except OSError as error:
        if entry.parent != spare:
            caches.warn_once(f"the compiler's programs are not kept: {error}; {caches.OTHER_DIRECTORY['aot']}.")
        entry = spare / entry.name
        _pack(work, entry)
    return entry


def _pack(work: pathlib.Path, entry: pathlib.Path) -> None:
    with caches.temporary_directory(entry.parent) as temporary:
        fresh = temporary / "entry"
        fresh.mkdir()
        for file in work.iterdir():
            needed = _BUNDLES.match(file.name) or "per-bundle-utilization" in file.name
            if needed and "schedule-analysis" not in file.name:
                (fresh / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes(), 5))
        (fresh / "result.json").write_text(caches.sealed((work / "result.json").read_text()))
        if not entry.exists():
            fresh.rename(entry)


class _NoBundles(DeviceError):
    """An entry has no bundles: libtpu wrote none, or they were lost since."""


_DAMAGE = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zlib.error, _NoBundles)
"""What reading an entry raises of which parts are lost or overwritten."""


def _load(entry: pathlib.Path, job: Job) -> Dump:
    chip = Target.parse_chip(job.target)
    result = json.loads(caches.opened((entry / "result.json").read_text()))
    if "rejected" in result:
        problem = result["problem"] and CompilerProblem(
            **result["problem"] | {"allocations": tuple(result["problem"]["allocations"])}
        )
        raise as_error(problem, result["rejected"])
    sources = read_sources(entry)
    if not sources:
        raise _NoBundles(f"libtpu {libtpu.versions()['libtpu']} wrote no bundles for {job.target}; 0.0.51 is known to.")
    return Dump(
        chip,
        sources,
        result.get("memory", {}),
        result.get("cost", {}),
        result.get("kernels", ()),
        result.get("twins", {}),
        result.get("warning"),
    )


class _Workers:
    """The compiler processes of a call, which end with it."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, command: Sequence[str], environment: Mapping[str, str], timeout: float) -> tuple[int, str]:
        """Runs a process to its end.

        Returns:
            its exit status and what it wrote to standard error.

        Raises:
            subprocess.TimeoutExpired: it was killed after `timeout` seconds.
        """
        with self._lock:
            if self._stopped:
                raise InterruptedError("the call that asked for it has ended")
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
            )
            self._running.add(process)
        try:
            _, output = process.communicate(timeout=timeout)
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()
            with self._lock:
                self._running.discard(process)
        return process.returncode, output

    def stop(self) -> None:
        """Ends what runs, and starts no more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.kill()


def _compile(
    jobs: Sequence[Job], entries_at: Sequence[pathlib.Path], spare: pathlib.Path, timeout: float, workers: _Workers
) -> tuple[dict[str, pathlib.Path], dict[str, str]]:
    """Compiles jobs in one worker, and goes on in a new one where libtpu ends the process.

    Returns:
        by fingerprint, where a job's dump is; and what a job's process said before it ended. That is not kept: it need
        not happen again.
    """
    dumps: dict[str, pathlib.Path] = {}
    crashed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="vishwamai-aot-") as temporary:
        root = pathlib.Path(temporary)
        pending = list(range(len(jobs)))
        for index in pending:
            (root / f"job{index}").mkdir()
            (root / f"job{index}.blob").write_bytes(jobs[index].blob)
        while pending:
            output = _run_worker(root, [(i, jobs[i]) for i in pending], timeout, workers)
            results = {i: root / f"job{i}" / "result.json" for i in pending}
            done = [i for i in pending if results[i].exists()]
            for index in done:
                result = json.loads(results[index].read_text())
                if "crashed" in result:
                    crashed[jobs[index].fingerprint] = result["crashed"]
                else:
                    dumps[jobs[index].fingerprint] = _keep(root / f"job{index}", entries_at[index], spare)
            pending = [i for i in pending if i not in done]
            if pending:  # the first one left is what the worker died of
                crashed[jobs[pending.pop(0)].fingerprint] = output
    return dumps, crashed


def _run_worker(root: pathlib.Path, jobs: Sequence[tuple[int, Job]], timeout: float, workers: _Workers) -> str:
    dump_directory = root / "dump"
    shutil.rmtree(dump_directory, ignore_errors=True)
    dump_directory.mkdir()
    entries = [
        {
            "blob": str(root / f"job{i}.blob"),
            "target": job.target,
            "options": dict(job.options),
            "out": str(root / f"job{i}"),
        }
        for i, job in jobs
    ]
    (root / "jobs.json").write_text(json.dumps({"dump": str(dump_directory), "jobs": entries}))
    command = [sys.executable, "-m", "vishwamai.aot.schedule.worker", str(root / "jobs.json")]
    try:
        status, stderr = workers.run(command, child.environment(dump_flags(dump_directory)), timeout)
    except subprocess.TimeoutExpired:
        return f"the compiler took longer than {timeout:.0f} s"
    return f"the compiler's process ended {child.ending(status)}: {child.last_words(stderr)}"


def dump_many(jobs: Sequence[Job], timeout: float = 900.0, workers: int = 1) -> Iterator[Dump | VishwamaiError]:
    """The dumps of several jobs, in order, by up to `workers` compiler processes; a job that is rejected gives its
    exception instead. What the cache has is read from there, and an entry that is damaged is made again. An exception
    that reaches this call, an interrupt among them, ends the processes and removes their files.
    """
    cache = caches.cache_directory("aot")
    with tempfile.TemporaryDirectory(prefix="vishwamai-aot-kept-") as temporary:
        spare = pathlib.Path(temporary)
        if cache is None:
            caches.warn_once(f"the compiler's programs are not kept: {caches.no_directory('aot')}.")
        paths = [(cache or spare) / job.fingerprint for job in jobs]
        missing = [i for i, entry in enumerate(paths) if not _is_file(entry / "result.json")]
        outcomes, crashed = _compile_all(
            [jobs[i] for i in missing], [paths[i] for i in missing], spare, timeout, workers
        )
        for job, entry in zip(jobs, paths):
            if job.fingerprint in crashed:
                yield KernelError(f"compiling for {job.target} failed: {crashed[job.fingerprint]}")
                continue
            try:
                yield _load_or_heal(outcomes.get(job.fingerprint), entry, job, spare, timeout)
            except VishwamaiError as error:
                yield error


def _is_file(path: pathlib.Path) -> bool:
    """Whether there is a file; False also where the directory cannot be read."""
    try:
        return path.is_file()
    except OSError:
        return False


def _compile_all(
    jobs: Sequence[Job], entries_at: Sequence[pathlib.Path], spare: pathlib.Path, timeout: float, workers: int
) -> tuple[dict[str, pathlib.Path], dict[str, str]]:
    """`_compile` by several processes."""
    dumps: dict[str, pathlib.Path] = {}
    crashed: dict[str, str] = {}
    if not jobs:
        return dumps, crashed
    for entry in entries_at:  # what is left of a damaged one
        shutil.rmtree(entry, ignore_errors=True)
    running, count = _Workers(), min(workers, len(jobs))
    with ThreadPoolExecutor(count) as pool:
        try:
            parts = [
                pool.submit(_compile, jobs[start::count], entries_at[start::count], spare, timeout, running)
                for start in range(count)
            ]
            for part in parts:
                part_dumps, part_crashes = part.result()  # raises what the thread raised
                dumps |= part_dumps
                crashed |= part_crashes
        except BaseException:
            running.stop()
            raise
    caches.trim("aot")
    return dumps, crashed


def _load_or_heal(
    fresh: pathlib.Path | None, entry: pathlib.Path, job: Job, spare: pathlib.Path, timeout: float
) -> Dump:
    """The dump of a job: of `fresh`, where it was compiled just now, else of the cache, which may be damaged."""
    if fresh is not None:
        return _load(fresh, job)
    try:
        return _load(entry, job)
    except _DAMAGE as error:
        if isinstance(error, VishwamaiError) and not isinstance(error, _NoBundles):
            raise
        caches.warn_once(f"{entry} is damaged ({type(error).__name__}: {error}); the program is compiled again.")
    made_again, crashed = _compile_all([job], [entry], spare, timeout, 1)
    if job.fingerprint in crashed:
        raise KernelError(f"compiling for {job.target} failed: {crashed[job.fingerprint]}")
    return _load(made_again[job.fingerprint], job)


def dump(job: Job, timeout: float = 900.0) -> Dump:
    """The dump of one job.

    Raises:
        DeviceError, UnsupportedError, KernelError: the compiler rejects, in the words of `compile_for`.
    """
    (result,) = dump_many([job], timeout)
    if isinstance(result, Exception):
        raise result
    return result
