"""Key/value cache of a looped model: one layer per block and, in the core, per loop slot.

Layer numbers: prelude block i is i, coda block i is P + i, core block j in loop t is
P + C + slot(t) R + j, with slot(t) = t (full) or t mod loop_budget. In a shared slot, loop t
overwrites what loop t - loop_budget wrote for the same positions, before it reads.

Memory: see `ParcaeConfig.cache_bytes`. Buffers are tensors that grow by half, or have a fixed size.
This file is copied into every exported folder: it needs torch and transformers and nothing else.
"""

import functools

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

# B rows, S new positions, G key/value heads, hd head width, N positions allocated


class LoopCacheLayer(CacheLayerMixin):
    """Keys and values of one block in one loop slot, in buffers [B, G, N, hd]."""

    is_croppable = True
    is_sliding = False

    def __init__(self, reserve: int = 0, static: bool = False) -> None:
        super().__init__()
        self.reserve = reserve
        self.static = static
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for keys of this shape, type and device."""
        self.device = key_states.device
        self.keys = _allocate(key_states, self.reserve, self.static)
        self.values = _allocate(value_states, self.reserve, self.static)
        self.is_initialized = True

    def update(
        self,
        key_states: Tensor,  # [B, G, S, hd]
        value_states: Tensor,
        *args: object,
        start: int | None = None,
        rows: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write S positions from `start` (default: append) and return everything up to their end.

        With `rows`, the states belong to these rows of the cache, and only these are returned.
        """
        begin = self.length if start is None else start
        end = begin + key_states.shape[2]
        self.make_room(key_states, value_states, end)
        target = slice(None) if rows is None else rows
        self.keys[target, :, begin:end] = key_states
        self.values[target, :, begin:end] = value_states
        self.length = end
        return self.read(end, rows)

    def append_token(self, key: Tensor, value: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """`update` for one position [B, G, 1, hd] of all rows, with fewer calls."""
        if not self.is_initialized or start >= self.keys.shape[2]:
            return self.update(key, value, start=start)
        self.length = end = start + 1
        keys, values = self.keys, self.values
        keys.narrow(2, start, 1).copy_(key)
        values.narrow(2, start, 1).copy_(value)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def read(self, end: int, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `end` positions; all N with a static shape."""
        keys, values = self.keys, self.values
        if not self.static:
            keys, values = keys[:, :, :end], values[:, :, :end]
        return (keys, values) if rows is None else (keys[rows], values[rows])

    def make_room(self, key_states: Tensor, value_states: Tensor, end: int) -> None:
        """Allocate, or grow the buffers by half, so that they hold `end` positions."""
        if not self.is_initialized:
            self.reserve = max(self.reserve, end)
            self.lazy_initialization(key_states, value_states)
        capacity = self.keys.shape[2]
        if end <= capacity:
            return
        if self.static:
            raise ValueError(f"the static cache holds {capacity} positions, {end} are needed")
        self.reserve = max(end, capacity + capacity // 2, 64)
        old, self.keys = self.keys, _allocate(self.keys, self.reserve, False)
        self.keys[:, :, : self.length] = old[:, :, : self.length]
        old, self.values = self.values, _allocate(self.values, self.reserve, False)
        self.values[:, :, : self.length] = old[:, :, : self.length]

    def copy_rows(self, source: "LoopCacheLayer", rows: Tensor, begin: int, end: int) -> None:
        """Take positions begin..end of `rows` from another layer."""
        self.make_room(source.keys, source.values, end)
        self.keys[rows, :, begin:end] = source.keys[rows, :, begin:end]
        self.values[rows, :, begin:end] = source.values[rows, :, begin:end]
        self.length = max(self.length, end)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of key positions the mask must cover, and the first one."""
        if self.static:
            return (
                self.keys.shape[2] if self.is_initialized else max(self.reserve, query_length)
            ), 0
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Positions stored."""
        return self.length

    def get_max_length(self) -> int:
        """Positions it can hold; -1 without limit."""
        return self.reserve if self.static else -1

    def reset(self) -> None:
        """Forget everything, keep the buffers."""
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last positions (a negative count)."""
        self.length = max(0, self.length - abs(tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows follow their beams."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        if self.is_initialized:
            self.keys = self.keys[indices.to(self.keys.device)]
            self.values = self.values[indices.to(self.values.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        if self.is_initialized:
            self.keys = self.keys.repeat_interleave(repeats, dim=0)
            self.values = self.values.repeat_interleave(repeats, dim=0)


class ParcaeCache(Cache):
    """Cache keyed by (loop slot, block).

    `loop_budget` None is full, 1 keeps the last loop only, b shares slot t mod b. `max_length`
    reserves that many positions at once; with `static` the shapes never change.
    """

    def __init__(
        self, *, loop_budget: int | None = None, max_length: int = 0, static: bool = False
    ) -> None:
        if loop_budget is not None and loop_budget < 1:
            raise ValueError(f"loop_budget={loop_budget} must be at least 1, or None for all loops")
        if static and max_length < 1:
            raise ValueError("a static cache needs max_length, the number of positions it holds")
        layer = functools.partial(LoopCacheLayer, reserve=max_length, static=static)
        super().__init__(layer_class_to_replicate=layer)
        self.loop_budget = loop_budget
        self.static = static
        self._loops_used: list[Tensor] = []
        self.decoder: tuple[object, object] | None = None
        """A model and its decode_parcae.Decoder. The cache is of no use once weights change, so
        this is the place where what was made of them may stay."""

    def __getstate__(self) -> dict[str, object]:
        """Copies of a cache go without the decoder."""
        return {**self.__dict__, "decoder": None}

    def layer(self, index: int) -> LoopCacheLayer:
        """Layer by number, made when it is new."""
        while len(self.layers) <= index:
            self.layers.append(self.layer_class_to_replicate())
        return self.layers[index]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of key positions the mask must cover, and the first one."""
        return self.layer(layer_idx).get_mask_sizes(query_length)

    def record_loops(self, used: Tensor) -> None:
        """Remember the loops [B] that the newest token took."""
        self._loops_used.append(used)

    @property
    def loops_used(self) -> Tensor:
        """Loops of every token generated with early exit: [B, tokens]."""
        if not self._loops_used:
            return torch.empty(0, 0, dtype=torch.long)
        return torch.stack(self._loops_used, dim=1)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated now."""
        tensors = [
            t for layer in self.layers if layer.is_initialized for t in (layer.keys, layer.values)
        ]
        return sum(t.numel() * t.element_size() for t in tensors)

    def reset(self) -> None:
        """Forget everything, keep the buffers."""
        super().reset()
        self._loops_used.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows follow their beams."""
        super().reorder_cache(beam_idx)
        self._loops_used = [used[beam_idx.to(used.device)] for used in self._loops_used]


def _allocate(like: Tensor, length: int, zeros: bool) -> Tensor:
    shape = (*like.shape[:2], length, like.shape[3])
    # Unwritten positions of a static cache are read and masked out, and 0 x NaN would be NaN.
    return like.new_zeros(shape) if zeros else like.new_empty(shape)


__all__ = ["LoopCacheLayer", "ParcaeCache"]
