"""Shows what is kept between runs, and removes it.

vishwamai cache
vishwamai cache clear
vishwamai cache clear tuning
"""

from __future__ import annotations

import argparse

from vishwamai.cli.console import tell

_HOLDS = {
    "tuning": "your own tuning tables",
    "aot": "answers of the TPU compiler",
    "jax": "compiled programs of generate and serve",
    "weights": "weights packed for this CPU",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=("show", "clear"), default="show", help="show (the default), or clear"
    )
    parser.add_argument(
        "caches",
        nargs="*",
        metavar="CACHE",
        help=(
            "which: tuning, aot, jax, weights. Without one, show lists all, and clear removes all but tuning: tuning "
            "tables cannot be made again without a search"
        ),
    )


def run(arguments: argparse.Namespace) -> int:
    """Plain text; 1 where something could not be removed."""
    from vishwamai.cli.function import CommandError
    from vishwamai.core import caches

    for name in arguments.caches:
        if name not in caches.CACHES:
            raise CommandError(f"cache: there is no cache {name!r}; name {', '.join(caches.CACHES)}.")
    if arguments.action == "clear":
        return max(_clear(cache) for cache in arguments.caches or ("aot", "jax", "weights"))
    for cache in arguments.caches or caches.CACHES:
        root, files = caches.cache_directory(cache), caches.entries(cache)
        size = sum(entry.bytes for entry in files) / 2**20
        bound = "" if cache in ("tuning", "weights") else f" of at most {caches.limit() >> 20}"
        tell(f"{cache:7} {_HOLDS[cache]}: {len(files)} entries, {size:.1f}{bound} MiB")
        tell(f"        {root or caches.no_directory(cache)}")
    return 0


def _clear(cache: str) -> int:
    from vishwamai.core import caches

    removed, size, failed = 0, 0, None
    for entry in caches.entries(cache):
        try:
            entry.remove()
        except OSError as error:
            failed = error
        else:
            removed, size = removed + 1, size + entry.bytes
    tell(f"{cache}: {removed} entries removed, {size / 2**20:.1f} MiB")
    if failed is not None:
        tell(f"{cache}: not all could be removed: {failed}")
    return 0 if failed is None else 1
