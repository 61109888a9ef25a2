"""Gets the final bundles of a program out of libtpu, and keeps them on disk.

A program is compiled in the compiler's process (`aot.worker`), and what the analysis needs of the dump is kept under
the program's fingerprint, compressed; the next call with the same program reads it from there.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vishwamai.aot.compile import libtpu
from vishwamai.aot.compile.child import Child, Ended
from vishwamai.aot.compile.diagnose import CompilerProblem, as_error
from vishwamai.aot.compile.traced import Program
from vishwamai.aot.schedule.simulate import Source
from vishwamai.core import caches
from vishwamai.core.errors import DeviceError, KernelError, VishwamaiError
from vishwamai.core.hardware import TpuChip
from vishwamai.core.target import Target


@dataclasses.dataclass(frozen=True)
class Dump:
    """The compiled form of a program: the text of each of its parts, and what the executable takes (as `Compiled` names
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
    """Moves what the analysis reads of a finished program into the cache, compressed, all at once; into `spare` where
    the cache cannot be written.

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


def _load(entry: pathlib.Path, program: Program) -> Dump:
    chip = Target.parse_chip(program.target)
    result = json.loads(caches.opened((entry / "result.json").read_text()))
    if "rejected" in result:
        problem = result["problem"] and CompilerProblem(
            **result["problem"] | {"allocations": tuple(result["problem"]["allocations"])}
        )
        raise as_error(problem, result["rejected"])
    sources = read_sources(entry)
    if not sources:
        raise _NoBundles(
            f"libtpu {libtpu.versions()['libtpu']} wrote no bundles for {program.target}; 0.0.51 is known to."
        )
    return Dump(
        chip,
        sources,
        result.get("memory", {}),
        result.get("cost", {}),
        result.get("kernels", ()),
        result.get("twins", {}),
        result.get("warning"),
    )


def _compile(
    programs: Sequence[Program], entries: Sequence[pathlib.Path], spare: pathlib.Path, child: Child
) -> tuple[dict[str, pathlib.Path], dict[str, str]]:
    """Compiles programs in one process, and goes on in a new one where libtpu ends it.

    Returns:
        by fingerprint, where a program's dump is; and what a program's process said before it ended. That is not kept:
        it need not happen again.
    """
    dumps: dict[str, pathlib.Path] = {}
    crashed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="vishwamai-aot-") as temporary, child:
        bundles = pathlib.Path(temporary, "dump")
        child.options = dump_flags(bundles)
        for index, (program, entry) in enumerate(zip(programs, entries)):
            shutil.rmtree(bundles, ignore_errors=True)  # of a process that ended
            out = pathlib.Path(temporary, f"program{index}")
            for directory in (bundles, out):
                directory.mkdir()
            try:
                answer = child.ask({**program.question(out), "bundles": str(bundles), "out": str(out)})
            except Ended as end:
                crashed[program.fingerprint] = str(end)
                continue
            (out / "result.json").write_text(json.dumps(answer))
            dumps[program.fingerprint] = _keep(out, entry, spare)
    return dumps, crashed


def dump_many(programs: Sequence[Program], timeout: float = 900.0, workers: int = 1) -> Iterator[Dump | VishwamaiError]:
    """The dumps of several programs, in order, by up to `workers` compiler processes.

    A program that is rejected gives its exception instead. What the cache has is read from there, and an entry that is
    damaged is made again. An exception that reaches this call, an interrupt among them, ends the processes and removes
    their files.
    """
    cache = caches.cache_directory("aot")
    with tempfile.TemporaryDirectory(prefix="vishwamai-aot-kept-") as temporary:
        spare = pathlib.Path(temporary)
        if cache is None:
            caches.warn_once(f"the compiler's programs are not kept: {caches.no_directory('aot')}.")
        paths = [(cache or spare) / program.fingerprint for program in programs]
        missing = [i for i, entry in enumerate(paths) if not _is_file(entry / "result.json")]
        outcomes, crashed = _compile_all(
            [programs[i] for i in missing], [paths[i] for i in missing], spare, timeout, workers
        )
        for program, entry in zip(programs, paths):
            if program.fingerprint in crashed:
                yield KernelError(f"compiling for {program.target} failed: {crashed[program.fingerprint]}")
                continue
            try:
                yield _load_or_heal(outcomes.get(program.fingerprint), entry, program, spare, timeout)
            except VishwamaiError as error:
                yield error


def _is_file(path: pathlib.Path) -> bool:
    """Whether there is a file; False also where the directory cannot be read."""
    try:
        return path.is_file()
    except OSError:
        return False


def _compile_all(
    programs: Sequence[Program], entries: Sequence[pathlib.Path], spare: pathlib.Path, timeout: float, workers: int
) -> tuple[dict[str, pathlib.Path], dict[str, str]]:
    """`_compile` by several processes."""
    dumps: dict[str, pathlib.Path] = {}
    crashed: dict[str, str] = {}
    if not programs:
        return dumps, crashed
    for entry in entries:  # what is left of a damaged one
        shutil.rmtree(entry, ignore_errors=True)
    count = min(workers, len(programs))
    children = [Child(timeout) for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        try:
            parts = [
                pool.submit(_compile, programs[start::count], entries[start::count], spare, children[start])
                for start in range(count)
            ]
            for part in parts:
                part_dumps, part_crashes = part.result()  # raises what the thread raised
                dumps |= part_dumps
                crashed |= part_crashes
        except BaseException:
            for child in children:
                child.kill()
            raise
    caches.trim("aot")
    return dumps, crashed


def _load_or_heal(
    fresh: pathlib.Path | None, entry: pathlib.Path, program: Program, spare: pathlib.Path, timeout: float
) -> Dump:
    """The dump of a program: of `fresh`, where it was compiled just now, else of the cache, which may be damaged."""
    if fresh is not None:
        return _load(fresh, program)
    try:
        return _load(entry, program)
    except _DAMAGE as error:
        if isinstance(error, VishwamaiError) and not isinstance(error, _NoBundles):
            raise
        caches.warn_once(f"{entry} is damaged ({type(error).__name__}: {error}); the program is compiled again.")
    made_again, crashed = _compile_all([program], [entry], spare, timeout, 1)
    if program.fingerprint in crashed:
        raise KernelError(f"compiling for {program.target} failed: {crashed[program.fingerprint]}")
    return _load(made_again[program.fingerprint], program)


def dump(program: Program, timeout: float = 900.0) -> Dump:
    """The dump of one program.

    Raises:
        DeviceError, UnsupportedError, KernelError: the compiler rejects, in the words of `compile_for`.
    """
    (result,) = dump_many([program], timeout)
    if isinstance(result, Exception):
        raise result
    return result
