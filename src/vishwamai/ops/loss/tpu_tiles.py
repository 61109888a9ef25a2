"""Tiles of the cross entropy on TPU: tokens that stay in VMEM, and words that pass by."""

from __future__ import annotations

import dataclasses

from vishwamai.core.errors import KernelError
from vishwamai.core.pallas import LANES, TPU_DTYPES, VmemTiles, planning_chip, round_up, vmem_budget
from vishwamai.core.target import Target
from vishwamai.core.tiles import option, size
from vishwamai.ops.loss.chunked import part_of_vocabulary
from vishwamai.ops.loss.spec import WITHOUT_TARGETS, LossSpec

_UNROLLED = 1 << 14
"""Cycles of products that one step's program holds at most; more is more program, less is more steps."""


def _tile_vocab(tiles: LossConfig, block_size: int) -> int:
    """An even number of sub-tiles, no more than now."""
    return min(tiles.tile_vocab, round_up(block_size, 2 * tiles.sub_vocab))


def _block_vocab(tiles: LossConfig, block_size: int) -> int:
    """Whole tiles, no more than now."""
    return min(tiles.block_vocab, round_up(block_size, _tile_vocab(tiles, block_size)))


@dataclasses.dataclass(frozen=True)
class LossConfig(VmemTiles):
    """Tiles of the TPU kernels.

    Attributes:
      block_tokens: tokens that stay in VMEM while the entries pass by; a multiple of 128.
      tile_vocab: entries of one step; an even number of `sub_vocab`.
      sub_vocab: entries that are multiplied at once; a multiple of 128.
      block_vocab: entries whose logits' gradient the backward pass holds in HBM at a time; it is brought to a multiple
        of `tile_vocab`.
      vmem_bytes: bytes of VMEM that a step plans to use, buffers and temporaries together.
    """

    block_tokens: int = size("tokens", least=LANES)
    tile_vocab: int = size("vocab", block_size=_tile_vocab)
    sub_vocab: int = size("vocab", least=LANES)
    block_vocab: int = option(block_size=_block_vocab)
    vmem_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tile_vocab % (2 * self.sub_vocab) or self.sub_vocab % LANES or self.block_tokens % LANES:
            raise KernelError(
                f"LossConfig: {self.block_tokens} tokens and {self.tile_vocab} vocab entries a step, {self.sub_vocab} "
                "at once; tile_vocab must be an even number of sub_vocab, for two tiles of logits take turns, and "
                f"sub_vocab and block_tokens multiples of {LANES}."
            )

    def needs(self, spec: LossSpec, target: Target) -> dict[str, int]:
        return {"vmem_bytes": _vmem(spec, self.block_tokens, self.tile_vocab, self.sub_vocab)}


def why_not(spec: LossSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    if spec.operands.targets is not None:
        return WITHOUT_TARGETS
    if spec.operands.x.dtype not in TPU_DTYPES:
        return f"`x` is {spec.operands.x.dtype.name}, and the TPU computes in float32 and bfloat16."
    if spec.precision == "high":
        return 'three bfloat16 products for one of float32 (precision="high") are left to XLA.'
    if spec.groups * spec.tokens == 0:
        return "there are no tokens."
    least = _vmem(spec, LANES, 2 * LANES, LANES)
    if least > vmem_budget(target):
        return (
            f"{LANES} tokens and {2 * LANES} vocab entries of {spec.features} features take {least:,} bytes of VMEM, "
            f"more than the {vmem_budget(target):,} there are to plan with."
        )
    return None


def _vmem(spec: LossSpec, tokens: int, tile: int, sub: int) -> int:
    """Bytes of VMEM: blocks twice, for a transfer runs beside the computation; two tiles of logits and what the
    compiler keeps of another two; and the pieces of bfloat16 into which it cuts one operand of a product of float32.
    """
    size, features = spec.operands.x.dtype.itemsize, round_up(spec.features, LANES)
    panels = 2 * (tokens + tile) * features * size
    pieces = 4 * min(tokens, sub) * features * 4 if spec.precision == "highest" else 0
    return panels + pieces + 4 * sub * tokens * 4 + 4 * tile * tokens * size + 64 * tokens * 4


def heuristic(spec: LossSpec, target: Target) -> LossConfig:
    """Enough tokens that the entries, which every panel of tokens reads again, pass by faster than they are multiplied;
    then as many entries as fit.
    """
    planned = planning_chip(target)
    budget = vmem_budget(target)
    passes = 6 if spec.precision == "highest" else 1
    multiplied = planned.peak_bf16 / planned.cores / 2 / planned.clock / passes  # multiply-adds a cycle of one core
    # A entry's features are read once for `tokens` of them: 2 * tokens operations for each element.
    needed = planned.peak_bf16 / passes / planned.hbm_bandwidth * spec.operands.x.dtype.itemsize / 2
    preferred = next((n for n in (256, 512) if n >= 1.25 * needed), 1024)
    every = spec.groups * spec.tokens if spec.shared else spec.tokens
    preferred = min(preferred, round_up(-(-every // planned.cores_per_device), LANES))
    entries = round_up(spec.vocab, 2 * LANES)

    def fits(tokens: int, tile: int, sub: int) -> bool:
        cycles = tokens * tile * spec.features / multiplied
        return _vmem(spec, tokens, tile, sub) <= budget and (cycles <= _UNROLLED or tile == 2 * LANES)

    choices = [
        (tokens, count * sub, sub)
        for tokens in (preferred, *(n for n in (512, 256, 128) if n < preferred))
        for sub in (256, 128)
        for count in (8, 4, 2)
        if count * sub <= entries
    ]
    tokens, tile, sub = next((c for c in choices if fits(*c)), (LANES, 2 * LANES, LANES))
    return LossConfig(tokens, tile, sub, part_of_vocabulary(spec.vocab, tile), _vmem(spec, tokens, tile, sub))
