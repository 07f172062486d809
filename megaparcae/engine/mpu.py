"""Our mesh under the names that DeepSpeed asks a Megatron "model parallel unit" for."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megaparcae.parallel.mesh import Axis, Mesh


class ModelParallelUnit:
    """Without a pipeline, DeepSpeed's model parallelism is our tensor parallelism."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)

    def _group(self, axis: Axis) -> ProcessGroup:
        return self._alone if axis.group is None else axis.group

    def get_model_parallel_rank(self) -> int:
        return self.mesh.tp.index

    def get_model_parallel_world_size(self) -> int:
        return self.mesh.tp.size

    def get_model_parallel_group(self) -> ProcessGroup:
        return self._group(self.mesh.tp)

    def get_data_parallel_rank(self) -> int:
        return self.mesh.dp.index

    def get_data_parallel_world_size(self) -> int:
        return self.mesh.dp.size

    def get_data_parallel_group(self) -> ProcessGroup:
        return self._group(self.mesh.dp)

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group
