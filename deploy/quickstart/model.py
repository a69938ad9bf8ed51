"""A small GPT whose MLPs are Mixture-of-Experts layers run by lrmoe workers."""

import math

import torch
from torch import nn
from torch.nn import functional

import lrmoe

VOCABULARY = 256  # bytes
LOOK_BACK = 3


class Attention(nn.Module):
    """Causal self-attention. Written out: PyTorch 1.13 has no scaled_dot_product_attention."""

    def __init__(self, hidden_size, num_heads, length):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.register_buffer("mask", torch.full((length, length), -math.inf).triu(1), persistent=False)

    def forward(self, x):
        batch, length, hidden_size = x.shape
        q, k, v = (part.view(batch, length, self.num_heads, -1).transpose(1, 2)
                   for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + self.mask[:length, :length]
        return self.out((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(batch, length, hidden_size))


class Block(nn.Module):
    def __init__(self, worker, index, options):
        super().__init__()
        hidden_size = options.hidden_size
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.attention = Attention(hidden_size, options.num_heads, options.length)
        self.moe_norm = nn.LayerNorm(hidden_size)
        self.router = nn.Linear(hidden_size, options.num_experts, bias=False)
        self.top_k = options.top_k
        self.experts = lrmoe.MoELayer(worker, index, options.num_experts, options.top_k, hidden_size,
                                      options.intermediate_size, dtype=options.dtype)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        h = self.moe_norm(x)
        probabilities = self.router(h).softmax(dim=-1)
        weights, ids = probabilities.topk(self.top_k, dim=-1)
        # Nothing balances the experts: the imbalance is the router's own.
        return x + self.experts(h, ids, weights / weights.sum(dim=-1, keepdim=True))


class Gpt(nn.Module):
    """options: num_layers, num_experts, top_k, hidden_size, intermediate_size, num_heads, length, dtype."""

    def __init__(self, worker, options, seed):
        super().__init__()
        torch.manual_seed(seed)  # the dense parameters are the same on every rank
        # One table for each of the last bytes: a few hundred steps are too few to learn to look back by attention alone.
        self.embeddings = nn.ModuleList(nn.Embedding(VOCABULARY, options.hidden_size) for _ in range(LOOK_BACK))
        self.position = nn.Embedding(options.length, options.hidden_size)
        self.blocks = nn.ModuleList(Block(worker, index, options) for index in range(options.num_layers))
        self.norm = nn.LayerNorm(options.hidden_size)
        self.head = nn.Linear(options.hidden_size, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        # Large beside what the first blocks add, so that they see the byte; a small model learns much faster so.
        for embedding in self.embeddings:
            nn.init.normal_(embedding.weight, std=0.5)
        nn.init.normal_(self.position.weight, std=0.1)
        self._load_experts(options, seed)

    def _load_experts(self, options, seed):
        for index, block in enumerate(self.blocks):
            generator = torch.Generator().manual_seed(seed * 1009 + index)
            shape = (options.num_experts, 2 * options.intermediate_size, options.hidden_size)
            gate_up = torch.randn(shape, generator=generator) / math.sqrt(options.hidden_size)
            shape = (options.num_experts, options.hidden_size, options.intermediate_size)
            down = torch.randn(shape, generator=generator) / math.sqrt(options.intermediate_size)
            down *= 0.2
            block.experts.load_experts(gate_up, down)

    def forward(self, inputs, targets):
        """inputs, targets [B, L] -> mean cross entropy in nats per byte."""
        x = self.position.weight[:inputs.shape[1]]
        for distance, embedding in enumerate(self.embeddings):
            x = x + embedding(functional.pad(inputs, (distance, 0))[:, :inputs.shape[1]])
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def moe_layers(self):
        return [block.experts for block in self.blocks]
