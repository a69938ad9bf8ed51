"""On every rank: lrmoe.megatron.Experts against Megatron-Core's own SequentialMLP, both built from MoE layer specifications.

Without a GPU Megatron's router and dispatchers do not run (they call CUDA): rows are permuted here as its dispatcher does."""

import unittest
import warnings

import torch
import torch.distributed as dist

import lrmoe
import lrmoe.megatron
from session import RANK, WORLD_SIZE, gathered, main

warnings.filterwarnings("ignore")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

E, K, H, F, TOKENS = 8, 3, 32, 24, 20
TOLERANCE = 1e-4
worker = lrmoe.connect(num_layers=1)


def configuration(**settings):
    return TransformerConfig(**{**dict(
        num_layers=1, hidden_size=H, num_attention_heads=4, num_moe_experts=E, moe_router_topk=K, ffn_hidden_size=F,
        moe_ffn_hidden_size=F, gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        use_cpu_initialization=True, moe_token_dispatcher_type="allgather", moe_router_load_balancing_type="none",
        bias_activation_fusion=False), **settings})


class Megatron(unittest.TestCase):
    def setUp(self):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()

    def layers(self):
        """(with lrmoe's experts, Megatron's own), the latter with the former's weights."""
        layers = []
        for experts in (ModuleSpec(module=lrmoe.megatron.Experts, params={"worker": worker}), None):
            spec = get_moe_module_spec(use_te=False, num_experts=E, moe_grouped_gemm=False)
            spec.submodules.experts = experts or spec.submodules.experts
            layers.append(MoELayer(configuration(), spec.submodules, layer_number=1))
        everything = {}
        for part in gathered(layers[0].experts.layer.expert_weights()):
            everything.update(part)
        for expert, (gate_up, down) in everything.items():
            own = layers[1].experts.local_experts[expert]
            own.linear_fc1.weight.data.copy_(gate_up)
            own.linear_fc2.weight.data.copy_(down)
        return layers

    def close(self, name, mine, theirs):
        error = float((mine - theirs).abs().max() / theirs.abs().max())
        self.assertLess(error, TOLERANCE, name)
        return error

    def test_1_equals_sequential_experts(self):
        lrmoe_layer, own = self.layers()
        self.assertFalse(list(lrmoe_layer.experts.parameters()))
        generator = torch.Generator().manual_seed(RANK)
        ids = torch.rand(TOKENS, E, generator=generator).topk(K, dim=-1).indices
        expert, token = torch.nonzero(torch.zeros(TOKENS, E).scatter(1, ids, 1.0).t(), as_tuple=True)
        counts = torch.bincount(expert, minlength=E)
        probabilities = torch.rand(len(token), generator=generator)
        x, dy = torch.randn(TOKENS, H, generator=generator), torch.randn(TOKENS, H, generator=generator)
        results = []
        for layer in (lrmoe_layer, own):
            inputs = x.clone().requires_grad_(), probabilities.clone().requires_grad_()
            rows, bias = layer.experts(inputs[0][token], counts, inputs[1])
            self.assertIsNone(bias)
            y = torch.zeros(TOKENS, H).index_add(0, token, rows)
            y.backward(dy)
            results.append((y.detach(), inputs[0].grad, inputs[1].grad))
        worst = max(self.close(name, mine, theirs) for name, mine, theirs in zip(("y", "dx", "dprobs"), *results))
        gradients = lrmoe_layer.experts.layer.expert_gradients()
        for index, own_expert in enumerate(own.experts.local_experts):
            for position, linear in enumerate((own_expert.linear_fc1, own_expert.linear_fc2)):
                total = linear.weight.grad if linear.weight.grad is not None else torch.zeros_like(linear.weight)
                dist.all_reduce(total)
                if index in gradients:
                    worst = max(worst, self.close("experts", gradients[index][position], total))
        lrmoe_layer.experts.backward_dw()
        self.assertEqual(lrmoe_layer.experts.sharded_state_dict(), {})
        worst = max(gathered(worst))
        if RANK == 0:
            print(f"worst Megatron-Core experts ({WORLD_SIZE} ranks): {worst:.1e}", flush=True)

    def test_2_refusals(self):
        for settings, word in ((dict(gated_linear_unit=False), "gated_linear_unit is False"),
                               (dict(add_bias_linear=True), "add_bias_linear is True"),
                               (dict(activation_func=torch.nn.functional.gelu), "activation_func is gelu")):
            with self.assertRaises(lrmoe.UnsupportedModel) as raised:
                lrmoe.megatron.Experts(E, configuration(**settings), worker=worker)
            self.assertIn(word, str(raised.exception))
        with self.assertRaisesRegex(lrmoe.UnsupportedModel, "num_local_experts is 4 of 8"):
            lrmoe.megatron.Experts(4, configuration(), worker=worker)


if __name__ == "__main__":
    main(Megatron)
