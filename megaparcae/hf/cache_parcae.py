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
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer

# B rows, S new positions, G key/value heads, hd head width, N positions allocated


class LoopCacheLayer(CacheLayerMixin):
    """Keys and values of one block in one loop slot, in buffers [B, G, N, hd]."""

    is_croppable = True
    is_sliding = False

    def __init__(self, reserve: int = 0) -> None:
        super().__init__()
        self.reserve = reserve
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for keys of this shape, type and device."""
        self.device = key_states.device
        self.keys = _allocate(key_states, self.reserve)
        self.values = _allocate(value_states, self.reserve)
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
        """Keys and values of the first `end` positions."""
        keys, values = self.keys[:, :, :end], self.values[:, :, :end]
        return (keys, values) if rows is None else (keys[rows], values[rows])

    def make_room(self, key_states: Tensor, value_states: Tensor, end: int) -> None:
        """Allocate, or grow the buffers by half, so that they hold `end` positions."""
        if not self.is_initialized:
            self.reserve = max(self.reserve, end)
            self.lazy_initialization(key_states, value_states)
        capacity = self.keys.shape[2]
        if end <= capacity:
            return
        self.reserve = max(end, capacity + capacity // 2, 64)
        old, self.keys = self.keys, _allocate(self.keys, self.reserve)
        self.keys[:, :, : self.length] = old[:, :, : self.length]
        old, self.values = self.values, _allocate(self.values, self.reserve)
        self.values[:, :, : self.length] = old[:, :, : self.length]

    def copy_rows(self, source: "LoopCacheLayer", rows: Tensor, begin: int) -> None:
        """Take position `begin` of `rows` from another layer."""
        end = begin + 1
        self.make_room(source.keys, source.values, end)
        self.keys[rows, :, begin:end] = source.keys[rows, :, begin:end]
        self.values[rows, :, begin:end] = source.values[rows, :, begin:end]
        self.length = max(self.length, end)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of key positions the mask must cover, and the first one."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Positions stored."""
        return self.length

    def get_max_length(self) -> int:
        """Positions it can hold; -1 is without limit."""
        return -1

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


class StaticLoopCacheLayer(StaticLayer):
    """The same with buffers of a fixed size and address, as torch.compile wants them.

    Everything is returned, with what is not written yet; the mask hides it.
    """

    def update(
        self,
        key_states: Tensor,  # [B, G, S, hd]
        value_states: Tensor,
        *args: object,
        start: int | Tensor | None = None,
        rows: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """As `LoopCacheLayer.update`; `start` is a tensor once there is something in the cache."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.cumulative_length if start is None else start
        where = torch.arange(key_states.shape[2], device=self.device) + begin
        self.cumulative_length.copy_(begin + key_states.shape[2])
        if rows is None:
            self.keys.index_copy_(2, where, key_states)
            self.values.index_copy_(2, where, value_states)
            return self.keys, self.values
        self.keys[rows[:, None], :, where] = key_states.transpose(1, 2)
        self.values[rows[:, None], :, where] = value_states.transpose(1, 2)
        return self.keys[rows], self.values[rows]

    def copy_rows(self, source: "StaticLoopCacheLayer", rows: Tensor, begin: Tensor) -> None:
        """Take position `begin` of `rows` from another layer."""
        if not self.is_initialized:
            self.lazy_initialization(source.keys, source.values)
        where = begin.expand(1)
        self.keys[rows[:, None], :, where] = source.keys[rows[:, None], :, where]
        self.values[rows[:, None], :, where] = source.values[rows[:, None], :, where]
        self.cumulative_length.copy_(torch.maximum(self.cumulative_length, begin + 1))


class ParcaeCache(Cache):
    """Cache keyed by (loop slot, block).

    `loop_budget` None is full, 1 keeps the last loop only, b shares slot t mod b. `max_length`
    reserves that many positions at once; with `static` shapes and addresses never change, and
    `generate` compiles the decoding step on GPUs.
    """

    def __init__(
        self, *, loop_budget: int | None = None, max_length: int = 0, static: bool = False
    ) -> None:
        if loop_budget is not None and loop_budget < 1:
            raise ValueError(f"loop_budget={loop_budget} must be at least 1, or None for all loops")
        if static and max_length < 1:
            raise ValueError("a static cache needs max_length, the number of positions it holds")
        kind = functools.partial(LoopCacheLayer, max_length)
        if static:
            kind = functools.partial(StaticLoopCacheLayer, max_length)
        super().__init__(layer_class_to_replicate=kind)
        self.loop_budget = loop_budget
        self.static = static
        self._loops_used: list[Tensor] = []
        self.decoder: tuple[object, object] | None = None
        """A model and its decode_parcae.Decoder. The cache is of no use once weights change, so
        this is the place where what was made of them may stay."""

    def __getstate__(self) -> dict[str, object]:
        """Copies of a cache go without the decoder."""
        return {**self.__dict__, "decoder": None}

    def layer(self, index: int) -> LoopCacheLayer | StaticLoopCacheLayer:
        """Layer by number, made when it is new."""
        while len(self.layers) <= index:
            self.layers.append(self.layer_class_to_replicate())
        return self.layers[index]

    def slot(self, t: int) -> int:
        """Loop slot of loop t."""
        return t if self.loop_budget is None else t % self.loop_budget

    @property
    def is_compileable(self) -> bool:
        """Also before it has layers, which is when `generate` asks."""
        return self.static

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


def _allocate(like: Tensor, length: int) -> Tensor:
    return like.new_empty((*like.shape[:2], length, like.shape[3]))


__all__ = ["LoopCacheLayer", "ParcaeCache", "StaticLoopCacheLayer"]
