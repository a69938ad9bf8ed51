"""What lrmoe.attach refuses, and that it says why. No worker: models are looked at before one is spoken to."""

import unittest

import torch
import transformers

import families
import lrmoe


class ClampedSilu(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.silu(x).clamp(max=20.0)


class Refusals(unittest.TestCase):
    def refused(self, model, *words):
        before = {name: value.clone() for name, value in model.state_dict().items() if value.device.type != "meta"}
        with self.assertRaises(lrmoe.UnsupportedModel) as raised:
            lrmoe.attach(model, None)
        for word in words:
            self.assertIn(word, str(raised.exception))
        after = model.state_dict()
        for name, value in before.items():
            self.assertTrue(torch.equal(after[name].nan_to_num(), value.nan_to_num()), name)

    def experts(self, model):
        return next(module for name, module in model.named_modules() if name.endswith(".experts"))

    def each(self, model, change):
        """Applies a change to every module that computes an activation for experts."""
        experts = self.experts(model)
        for module in [experts] if families.form(model) == "stacked" else experts:
            change(module)

    def test_clamped_and_biased_experts(self):
        config = transformers.GptOssConfig(
            vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_local_experts=4,
            num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=0)
        config._attn_implementation = "eager"
        self.refused(transformers.GptOssForCausalLM(config), "layers.0.mlp.experts", "GptOssExperts", "gate_up_proj_bias",
                     "limit is 7.0: a clamped activation", "alpha is 1.702: a scaled activation")

    def test_another_activation(self):
        self.refused(families.make("qwen3_moe", hidden_act="gelu"), "differs", "another activation")

    def test_clamp_that_only_large_values_show(self):
        model = families.make("mixtral")
        self.each(model, lambda m: setattr(m, "act_fn", ClampedSilu()))
        self.refused(model, "FC1 outputs up to 60")

    def test_other_types(self):
        self.refused(families.make("olmoe", dtype=torch.float16), "torch.float16")

    def test_weights_that_are_not_loaded(self):
        with torch.device("meta"):
            model = transformers.Qwen3MoeForCausalLM(families.make("qwen3_moe").config)
        self.refused(model, "meta device")

    def test_weights_that_are_not_numbers(self):
        model = families.make("glm4_moe")
        next(p for n, p in model.named_parameters() if ".experts." in n).data.fill_(float("nan"))
        self.refused(model, "nan")

    def test_routing_that_is_not_known(self):
        model = families.make("mixtral")
        if families.form(model) == "stacked":
            self.skipTest("routing is the framework's in this form")
        block = model.model.layers[0].block_sparse_moe
        gate = block.gate
        block.gate = torch.nn.Sequential(gate)
        self.refused(model, "how it routes tokens is not known")
        block.gate = gate
        plain = type(block).forward
        block.forward = lambda x: (plain(block, x)[0] * 2, None)
        self.refused(model, "routing")

    def test_linear_maps_of_another_kind(self):
        model = families.make("glm4_moe")
        if families.form(model) == "stacked":
            self.skipTest("no linear maps in this form")
        expert = self.experts(model)[3]
        expert.up_proj = torch.nn.Linear(32, 24, bias=True)
        self.refused(model, "3.up_proj: has a bias")
        expert.up_proj = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(32, 24, bias=False))
        self.refused(model, "3.up_proj: ParametrizedLinear is not torch.nn.Linear")

    def test_no_experts(self):
        self.refused(torch.nn.Sequential(torch.nn.Linear(2, 2)), "Sequential has no Mixture-of-Experts block")

    def test_not_attached(self):
        for function in (lrmoe.detach, lrmoe.gather):
            with self.assertRaisesRegex(ValueError, "no attached experts"):
                function(families.make("mixtral"))


if __name__ == "__main__":
    unittest.main()
