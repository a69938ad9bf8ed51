"""lrmoe.attach: the expert blocks of a model handed to the workers, in place; lrmoe.detach gives them back."""

import torch
from torch import nn

from .blocks import find_blocks
from .errors import Error
from .gather import ExpertExchange
from .layer import MoELayer


class AttachedExperts(nn.Module):
    """Stands where a model's experts were. Its state dict has the keys, shapes and types the experts had.

    Each rank holds its own experts only, so with more than one rank state_dict() wants lrmoe.gather(model) first, and
    raises lrmoe.Error without. load_state_dict() is collective here and takes stacked tensors and a key per expert."""

    def __init__(self, layer, block):
        super().__init__()
        self.layer = layer
        self.num_experts = block.num_experts
        self._block = block  # not a module: what it holds is no longer part of the model
        self._gathered = None  # (parameter changes of the worker at that time, {expert: (gate_up, down)})

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """hidden_states [..., H], top_k_index [..., k], top_k_weights [..., k] -> [..., H], see MoELayer.forward."""
        if self._gathered is not None and not self._fresh():
            self._gathered = None
        return self.layer(hidden_states, top_k_index, top_k_weights)

    def _fresh(self):
        return self._gathered is not None and self._gathered[0] == self.layer._worker._parameter_changes

    def _gather(self, exchange, keep):
        weights = {}
        for expert, gate_up, down in exchange.experts(self.layer):
            if keep:
                weights[expert] = (gate_up.to(self._block.dtype, copy=True), down.to(self._block.dtype, copy=True))
        self._gathered = (self.layer._worker._parameter_changes, weights) if keep else None

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if self._fresh():
            weights = self._gathered[1]
        elif self.layer._worker.world_size == 1:
            weights = self.layer.expert_weights()
        else:
            raise Error("FAILED_PRECONDITION", f"{self._block.name}: this rank holds {len(self.layer._worker.owned_experts)} "
                        f"of {self.num_experts} experts: call lrmoe.gather(model) on all ranks first, after the last step")
        for key, value in self._block.entries(weights):
            destination[prefix + key] = value

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        stacked = [prefix + name for name in ("gate_up_proj", "down_proj")]
        names = getattr(self._block, "projections", ("gate_proj", "up_proj", "down_proj"))
        if all(key in state_dict for key in stacked):
            gate_up, down = (state_dict[key] for key in stacked)
            self.layer.load_each(lambda expert: (gate_up[expert], down[expert]))
            return
        keys = [f"{prefix}{expert}.{name}.weight" for expert in range(self.num_experts) for name in names]
        missing = [key for key in keys if key not in state_dict]
        if missing:
            missing_keys.extend(stacked if len(missing) == len(keys) else missing)
            return

        def weights_of(expert):
            gate, up, down = (state_dict[f"{prefix}{expert}.{name}.weight"] for name in names)
            return torch.cat([gate, up]), down
        self.layer.load_each(weights_of)


def attach(model, worker, *, dtype=None):
    """Collective. Replaces the expert blocks of `model` in place: the workers run them from here on.

    model: a torch module, such as a transformers model of the Qwen3-MoE, GLM-4.5, Mixtral, OLMoE or DeepSeek-V3
      families, with its weights loaded and equal on all ranks. Blocks are found by their structure, in stacked form or
      with a module per expert, and each is checked by running it on a few random tokens. Router, shared experts,
      auxiliary losses and everything else stay as they are; gradient checkpointing, generate() and torch.compile work.
    worker: from lrmoe.connect(). dtype: compute type of the experts, bfloat16 or float32; default: their weights'.

    The experts' parameters leave model.parameters(): lrmoe.AdamW trains them. Their memory is freed. Refused: experts that
    are quantised, LoRA-wrapped, sharded by FSDP, ZeRO-3 or tensor parallelism, or of different shapes in different layers.
    The workers keep their AdamW moments for the session: a model attached after detach() starts with the last one's.

    Returns the MoELayers in the order of the model. Raises lrmoe.UnsupportedModel, naming the differences, with the
    model unchanged when the experts are not plain SwiGLU experts, lrmoe.Error when a worker refuses them."""
    if attached_experts(model):
        raise ValueError(f"{type(model).__name__} is attached already")
    blocks = find_blocks(model)
    first = max(worker._layers, default=-1) + 1
    layers = []
    try:
        for index, block in enumerate(blocks, first):
            layers.append(MoELayer(worker, index, block.num_experts, block.top_k, block.hidden_size,
                                   block.intermediate_size, dtype=dtype or block.dtype))
        for layer, block in zip(layers, blocks):
            layer.load_each(block.weights_of)
    except BaseException:
        for layer in layers:
            worker._unregister(layer)
        raise
    for layer, block in zip(layers, blocks):
        layer.train(block.experts.training)
        attached = AttachedExperts(layer, block)
        attached.training = block.experts.training
        block.install(attached)
        block.free()
    return layers


def attached_experts(model):
    """The AttachedExperts of a model, in order."""
    return [module for module in model.modules() if isinstance(module, AttachedExperts)]


def gather(model, ranks=None):
    """Collective. Fetches the trained experts of all ranks, so that state_dict() and save_pretrained() have them until
    the next optimizer step. ranks: which ranks keep them, in the weights' own type in host memory; default: all.

        lrmoe.gather(model, ranks=[0])
        if worker.rank == 0: model.save_pretrained(folder)     # opens without lrmoe

    With more than one rank torch.distributed must be initialised with the workers' ranks."""
    attached = attached_experts(model)
    if not attached:
        raise ValueError(f"{type(model).__name__} has no attached experts")
    worker = attached[0].layer._worker
    exchange = ExpertExchange(worker)
    for experts in attached:
        experts._gather(exchange, ranks is None or worker.rank in ranks)


@torch.no_grad()
def detach(model):
    """Collective. Undoes lrmoe.attach: the model's own expert modules come back, on every rank with the trained weights
    of all experts, as the same parameter objects. Needs what lrmoe.gather needs."""
    attached = attached_experts(model)
    if not attached:
        raise ValueError(f"{type(model).__name__} has no attached experts")
    exchange = ExpertExchange(attached[0].layer._worker)
    for experts in attached:
        block, layer = experts._block, experts.layer
        block.allocate()
        for expert, gate_up, down in exchange.experts(layer):
            block.set_weights(expert, gate_up, down)
        block.restore()
        block.experts.train(experts.training)
        layer._worker._unregister(layer)
