"""Experts for Megatron-Core's MoE layer. Imports nothing of Megatron: its configuration object tells all there is to know.

    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    spec = get_moe_module_spec(use_te=False, num_experts=E)
    spec.submodules.experts = ModuleSpec(module=lrmoe.megatron.Experts, params={"worker": worker})
"""

import torch
from torch import nn

from .errors import UnsupportedModel
from .layer import MoELayer

# Setting of TransformerConfig -> the one value the experts can follow, and what any other means.
_WANTED = {
    "gated_linear_unit": (True, "experts without a gate"),
    "add_bias_linear": (False, "experts with biases"),
    "expert_model_parallel_size": (1, "experts spread over ranks by Megatron: the workers do that"),
    "expert_tensor_parallel_size": (1, "experts split within a rank"),
    "tensor_model_parallel_size": (1, "tokens split within a rank"),
    "pipeline_model_parallel_size": (1, "ranks that do not have all layers, while every call here is one of all ranks"),
    "moe_apply_probs_on_input": (False, "probabilities multiplied before the experts"),
    "moe_latent_size": (None, "experts of another width"),
    "fp8": (None, "FP8 experts"),
    "activation_func_clamp_value": (None, "a clamped activation"),
    "glu_linear_offset": (0.0, "an offset in the gate"),
}


class Experts(nn.Module):
    """Megatron-Core's experts protocol, run by the workers: forward(rows [R, H], tokens_per_expert [E], probabilities [R])
    -> ([R, H], None), rows sorted by expert, as Megatron's own dispatcher leaves them with one expert-parallel rank.

    num_local_experts: must be all experts, since the workers spread them over ranks. config: the TransformerConfig; raises
    lrmoe.UnsupportedModel naming every setting that the experts cannot follow. worker: from lrmoe.connect().

    Layers must be built in the same order on all ranks. Weights start as config.init_method and
    config.output_layer_init_method make them, from a generator of the layer's own, equal on all ranks; they are not
    parameters of the model: lrmoe.AdamW trains them, worker.save_checkpoint() saves them, sharded_state_dict() has none.
    To the workers each row is a token with one expert, so a token's rows are not shared on the wire.
    """

    def __init__(self, num_local_experts, config, submodules=None, pg_collection=None, *, worker, seed=1234):
        super().__init__()
        reasons = [f"{name} is {getattr(config, name)}: {meaning}" for name, (value, meaning) in _WANTED.items()
                   if (getattr(config, name, value) or None) != (value or None)]
        if getattr(config, "activation_func", nn.functional.silu) is not nn.functional.silu:
            reasons.append(f"activation_func is {config.activation_func.__name__}: not silu")
        if num_local_experts != config.num_moe_experts:
            reasons.append(f"num_local_experts is {num_local_experts} of {config.num_moe_experts}")
        if reasons:
            raise UnsupportedModel("lrmoe cannot run the experts of this configuration: " + "; ".join(reasons))
        self.config, self.num_local_experts = config, num_local_experts
        index = max(worker._layers, default=-1) + 1
        self.layer = MoELayer(worker, index, num_local_experts, 1, config.hidden_size, config.moe_ffn_hidden_size,
                              dtype=config.params_dtype)
        gate_up, down = (torch.empty(num_local_experts, *shape) for shape in self.layer._expert_shapes())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 4099 + index)
            for expert in range(num_local_experts):
                config.init_method(gate_up[expert])
                config.output_layer_init_method(down[expert])
        self.layer.load_experts(gate_up, down)

    def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs):
        """See the class. tokens_per_expert: a tensor on any device, or a list. Collective, like MoELayer's forward."""
        counts = torch.as_tensor(tokens_per_expert).cpu().long()
        ids = torch.repeat_interleave(torch.arange(self.num_local_experts), counts)[:, None]
        return self.layer(permuted_local_hidden_states, ids, permuted_probs.reshape(-1, 1)), None

    def backward_dw(self):
        """Weight gradients come with the backward pass: nothing is left to do."""

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Empty: the experts are in worker.save_checkpoint()."""
        return {}
