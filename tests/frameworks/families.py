"""Small models of every supported family, with random weights, in whichever form the installed transformers has."""

import torch
import transformers

VOCABULARY = 64

_COMMON = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
               max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=True)
_SIGMOID = dict(intermediate_size=48, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_group=2,
                topk_group=1, n_shared_experts=1, first_k_dense_replace=1, norm_topk_prob=True,
                routed_scaling_factor=1.5)

# name -> (configuration class, model class, settings); Qwen3-MoE has a dense layer in between.
FAMILIES = {
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", dict(
        intermediate_size=48, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, head_dim=8,
        norm_topk_prob=True, mlp_only_layers=[1], output_router_logits=True, router_aux_loss_coef=0.02)),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", dict(_SIGMOID, head_dim=8)),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", dict(
        intermediate_size=24, num_local_experts=6, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.02)),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", dict(
        intermediate_size=24, num_experts=8, num_experts_per_tok=3, norm_topk_prob=False, output_router_logits=True,
        router_aux_loss_coef=0.02)),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", dict(
        _SIGMOID, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=8)),
}


def make(family, seed=0, dtype=torch.float32, **settings):
    """A model in training mode; equal for equal arguments, and no expert the same as another."""
    configuration, model, own = FAMILIES[family]
    config = getattr(transformers, configuration)(**{**_COMMON, **own, **settings})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    made = getattr(transformers, model)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1:  # large enough that every gradient is well above rounding
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
        for name, buffer in made.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) * 0.1)
    return made.to(dtype).train()


def form(model):
    """"stacked" or "list": how this model holds its experts."""
    return "stacked" if any(name.endswith("experts.gate_up_proj") for name, _ in model.named_parameters()) else "list"


def batch(seed, rank, size=2, length=12):
    """input_ids [size, length]; different on every rank."""
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    return torch.randint(3, VOCABULARY, (size, length), generator=generator)
