"""Trained experts from the ranks that own them to the others, over torch.distributed."""

import torch
import torch.distributed as dist

from .errors import Error


class ExpertExchange:
    """Collective. Brings the experts of a worker's layers to every rank. Needs torch.distributed with the worker's
    ranks when there is more than one; raises lrmoe.Error when it is not initialised so."""

    def __init__(self, worker):
        self._rank, world_size = worker.rank, worker.world_size
        self._alone = world_size == 1
        if self._alone:
            self._owner = dict.fromkeys(worker.owned_experts, 0)
            return
        if not (dist.is_available() and dist.is_initialized()):
            raise Error("FAILED_PRECONDITION", "experts of other ranks travel over torch.distributed: call "
                        "torch.distributed.init_process_group first")
        if (dist.get_rank(), dist.get_world_size()) != (self._rank, world_size):
            raise Error("FAILED_PRECONDITION", f"this is rank {dist.get_rank()} of {dist.get_world_size()} in "
                        f"torch.distributed but rank {self._rank} of {world_size} among the workers")
        # The experts lie in host memory.
        self._group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        owned = [None] * world_size
        dist.all_gather_object(owned, worker.owned_experts, group=self._group)
        self._owner = {expert: rank for rank, experts in enumerate(owned) for expert in experts}

    def experts(self, layer):
        """Collective. Yields (expert, gate_up [2F, H], down [H, F]), fp32, valid until the next one is asked for."""
        for expert in range(layer.num_experts):
            owner = self._owner[expert]
            if owner == self._rank:
                parts = layer._export_one(expert)
            else:
                parts = tuple(torch.empty(shape) for shape in layer._expert_shapes())
            for part in () if self._alone else parts:
                dist.broadcast(part, owner, group=self._group)
            yield (expert, *parts)
