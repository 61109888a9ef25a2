"""What the tables of paged attention may hold: their values, where `checks` has their shapes and dtypes."""

from __future__ import annotations

import numpy as np

from vishwamai.core.errors import ShapeError


def check_table_values(
    name: str,
    pool: tuple[int, int],
    tokens: int,
    max_q_len: int | None,
    kv_lens: np.ndarray,
    page_indices: np.ndarray,
    cu_q_lens: np.ndarray,
    num_seqs: np.ndarray,
    *,
    positions: int | None = None,
) -> None:
    """Checks the sequences that count; entries past `num_seqs`, and of pages past a sequence's end, may hold anything.

    Args:
      name: the public function, for the error.
      pool: (pages, page_size).
      tokens: rows of the query, or of the new keys.
      max_q_len: the caller's bound of the sequences' new tokens.
      positions: how many the tables have that the new keys are rotated by, None where they are not.

    Raises:
      ShapeError: a value contradicts the others; the text names it, where it is, and what may stand there.
    """
    (pages, page_size), (sequences, entries) = pool, page_indices.shape
    count = int(num_seqs.reshape(-1)[0])
    if not 0 <= count <= sequences:
        raise ShapeError(
            f"{name}: `num_seqs` is {count}, but `page_indices` has {sequences} rows; pass 0 ... {sequences}."
        )
    if not count:
        return
    starts, lens = cu_q_lens[: count + 1].astype(np.int64), kv_lens[:count].astype(np.int64)
    new = np.diff(starts)
    if starts[0] != 0 or (new < 0).any():
        position = 0 if starts[0] != 0 else int(np.argmax(new < 0)) + 1
        raise ShapeError(
            f"{name}: `cu_q_lens` has {starts[position]} at [{position}]; it says where each sequence's tokens start: "
            "pass numbers from 0 on that never decrease."
        )
    if starts[-1] > tokens:
        raise ShapeError(
            f"{name}: `cu_q_lens` ends with {starts[-1]} at [{count}], but there are {tokens} tokens; pass {tokens} at "
            "most."
        )
    room = entries * page_size
    wrong = (lens < new) | (lens > room)
    if wrong.any():
        s = int(np.argmax(wrong))
        least = f"from {new[s]}, its new tokens, " if lens[s] < new[s] else ""
        raise ShapeError(
            f"{name}: `kv_lens` has {lens[s]} at [{s}]; pass a length {least}to {room}, what {entries} pages of "
            f"{page_size} tokens hold."
        )
    if positions is not None and ((lens > positions) & (new > 0)).any():
        s = int(np.argmax((lens > positions) & (new > 0)))
        raise ShapeError(
            f"{name}: `kv_lens` has {lens[s]} at [{s}], but `rope_tables` have {positions} positions; pass tables of "
            f"{lens[s]} positions or more."
        )
    if max_q_len is not None and (new > max_q_len).any():
        s = int(np.argmax(new > max_q_len))
        raise ShapeError(
            f"{name}: `max_q_len` is {max_q_len}, but sequence {s} has {new[s]} tokens by `cu_q_lens`; pass "
            f"{new.max()} or more, or None."
        )
    used = np.arange(entries) < -(-lens[:, None] // page_size)  # [count, entries]
    wrong = used & ((page_indices[:count] < 0) | (page_indices[:count] >= pages))
    if wrong.any():
        s, entry = (int(i) for i in np.argwhere(wrong)[0])
        raise ShapeError(
            f"{name}: `page_indices` has {page_indices[s, entry]} at [{s}, {entry}], a page that the {lens[s]} tokens "
            f"of sequence {s} need; pass a page from 0 to {pages - 1}."
        )
