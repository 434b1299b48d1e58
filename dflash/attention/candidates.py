"""The configs that the attention kernels are tuned over, a few for each architecture.

Tiles are written for head dim 128 in 16 bits; ``scaled`` shrinks them for larger heads and wider numbers, so that a
config's shared memory is about the same for every head dim and dtype, and one short list serves all of them.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton

KEY = ["HEAD_DIM", "ITEM_BYTES", "KV_HEADS", "GROUP", "BLOCK_SIZE", "CAUSAL", "BOUNDED", "size_class"]
"""The autotune key: finite over buckets, anchor counts and batch sizes."""

_TILE_MIN = 16
_FULL_ROW_BYTES = 256


@triton.constexpr_function
def scaled(tile, head_dim, item_bytes):
    """Rows of a tile for this head dim and dtype: as many as keep its bytes at those of rows of 128 16-bit numbers."""
    row_bytes = triton.next_power_of_2(head_dim) * item_bytes
    if item_bytes > 2:  # no matrix unit: products are unrolled multiply-adds, which spill in tiles of the usual size
        row_bytes *= 2
    return max(min(tile, _TILE_MIN), tile * _FULL_ROW_BYTES // max(row_bytes, _FULL_ROW_BYTES))


def _forward(tile_m: int, tile_n: int, num_warps: int, num_stages: int) -> triton.Config:
    return triton.Config({"TILE_M": tile_m, "TILE_N": tile_n}, num_warps=num_warps, num_stages=num_stages)


def _backward(query: tuple[int, int], key: tuple[int, int], num_warps: int, num_stages: int) -> triton.Config:
    tiles = {"TILE_M": query[0], "TILE_N": query[1], "KEY_TILE_M": key[0], "KEY_TILE_N": key[1]}
    return triton.Config(tiles, num_warps=num_warps, num_stages=num_stages)


def forward_configs(capability: tuple[int, int] | None) -> list[triton.Config]:
    """Candidates of the forward kernel; None is the interpreter, which is slow by the operation."""
    if capability is None:
        return [_forward(256, 128, 4, 1), _forward(64, 64, 4, 1)]
    if capability[0] == 9:
        return [_forward(128, 128, 8, 3), _forward(128, 64, 8, 3), _forward(64, 64, 4, 3)]
    if capability[0] == 10:
        return [_forward(128, 64, 8, 3), _forward(64, 64, 4, 3)]
    return [_forward(128, 32, 8, 2), _forward(128, 64, 8, 2), _forward(64, 32, 4, 2)]


def backward_configs(capability: tuple[int, int] | None) -> list[triton.Config]:
    """Candidates of the backward kernel; None stands for the interpreter."""
    if capability is None:
        return [_backward((256, 128), (128, 256), 4, 1), _backward((64, 64), (64, 64), 4, 1)]
    if capability[0] == 9:
        return [_backward((128, 64), (64, 128), 8, 3), _backward((64, 64), (64, 64), 4, 2)]
    if capability[0] == 10:
        return [_backward((128, 64), (64, 128), 8, 2), _backward((128, 64), (64, 64), 8, 3)]
    return [_backward((64, 32), (32, 64), 4, 2), _backward((64, 64), (64, 64), 8, 2)]


def _capability() -> tuple[int, int] | None:
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return major, minor


FORWARD = forward_configs(_capability())
BACKWARD = backward_configs(_capability())
