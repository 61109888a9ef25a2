"""Checks every native source for Apple silicon without a Mac: `make apple-syntax`.

Zig's package from PyPI (ziglang) has clang, libc++ and the C headers of macOS. Each source is parsed for
arm64-apple-macos, once for every instruction set that CMakeLists.txt compiles it for; no object is made and nothing
runs.

python tools/apple_syntax.py [SOURCE...]
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "vishwamai"
TARGET = "arm64-apple-macos13"
LIBCXX = (  # what libc++'s build writes into <__config_site>
    *("-D_LIBCPP_ABI_VERSION=1", "-D_LIBCPP_ABI_NAMESPACE=__1", "-D_LIBCPP_HAS_THREADS=1"),
    *("-D_LIBCPP_HAS_MONOTONIC_CLOCK=1", "-D_LIBCPP_HARDENING_MODE_DEFAULT=2", "-D_LIBCPP_PSTL_BACKEND_SERIAL"),
    *("-D_LIBCPP_HAS_LOCALIZATION=1", "-D_LIBCPP_HAS_WIDE_CHARACTERS=1", "-D_LIBCPP_HAS_UNICODE=1"),
    *("-D_LIBCPP_HAS_FILESYSTEM=1", "-D_LIBCPP_HAS_RANDOM_DEVICE=1"),
    "-D_LIBCPP_ASSERTION_SEMANTIC_DEFAULT=_LIBCPP_ASSERTION_SEMANTIC_IGNORE",
)


def folder(package: str) -> Path:
    """Where a package is installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"apple_syntax: there is no {package}: pip install {package}")
    return Path(spec.submodule_search_locations[0])


def arm_sets() -> dict[str, list[str]]:
    """{instruction set: its flags} of CMakeLists.txt for Arm, `generic` among them."""
    text = (ROOT / "CMakeLists.txt").read_text("utf-8")
    flags = dict(re.findall(r"set\(ISA_FLAGS_(neon_\w+) ([^)]*)\)", text))
    return {name: [*words.split(), f"-DVISHWAMAI_ISA={name}"] for name, words in {"generic": "", **flags}.items()}


def compiler() -> list[str]:
    """The command and the options of all sources."""
    zig = folder("ziglang")
    places = ("libcxx/include", "libcxxabi/include", "include", "libc/include/any-darwin-any")
    headers = [word for place in places for word in ("-isystem", str(zig / "lib" / place))]
    headers += ["-isystem", str(folder("jaxlib") / "include"), "-isystem", sysconfig.get_path("include")]
    options = ["-x", "c++", f"--target={TARGET}", "-std=c++20", "-fsyntax-only", "-nostdinc", "-Wall", "-Wextra"]
    return [str(zig / "zig"), "clang", *options, *headers, *LIBCXX, f"-I{ROOT / 'src'}"]


def main(words: list[str]) -> int:
    sources = [Path(word).resolve() for word in words] or sorted(SOURCES.rglob("*.cc"))
    command, sets = compiler(), arm_sets()
    jobs = [
        (source, isa, [*command, *flags, str(source)])
        for source in sources
        for isa, flags in (sets if source.name.endswith(".isa.cc") else {"": []}).items()
    ]
    failures = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda job: subprocess.run(job[2], capture_output=True, text=True), jobs)
        for (source, isa, _), result in zip(jobs, results, strict=True):
            if result.returncode:
                failures += 1
                print(f"{source.relative_to(ROOT)} {isa}\n{result.stderr[-2000:]}")
    print(f"apple_syntax: {len(jobs) - failures} of {len(jobs)} pass for {TARGET}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
