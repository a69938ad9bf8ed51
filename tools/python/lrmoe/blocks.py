"""The expert blocks of a model, found by what they are made of, and checked by what they compute.

Two forms of the same experts are known: stacked tensors (`experts.gate_up_proj` [E, 2F, H], `experts.down_proj`
[E, H, F]; transformers 5) and a module per expert (`experts.7.gate_proj.weight` [F, H]; transformers 4). A block counts
as supported when plain SwiGLU experts reproduce its own output on random tokens.
"""

import types

import torch
from torch import nn
from torch.nn import functional

from .errors import UnsupportedModel

_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_DTYPES = (torch.float32, torch.bfloat16)
_MAX_REASONS = 12
_PROBE_TOKENS = 8
_PROBE_SCALES = (1.0, 60.0)  # of the largest FC1 output: a clamp shows in the second only
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
# Attributes of expert modules that mean other mathematics, and the value that means none.
_DIFFERENCES = {
    "has_bias": (False, "experts with biases"), "is_transposed": (False, "transposed weights"),
    "has_gate": (True, "experts without a gate"), "is_concatenated": (True, "interleaved gate and up rows"),
    "has_post_expert_norm": (False, "a norm behind each expert"), "limit": (None, "a clamped activation"),
    "swiglu_limit": (None, "a clamped activation"), "alpha": (None, "a scaled activation"),
    "_is_expert_parallel": (False, "experts the framework has already spread over ranks"),
}


def swiglu(x, gate_up, down):
    """One expert: x [n, H], gate_up [2F, H], down [H, F] -> [n, H]."""
    gate, up = functional.linear(x, gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down)


class Block:
    """The routed experts of one layer. `name` of the experts module, `parent` that holds it, as attribute `attribute`.

    num_experts E, top_k k, hidden_size H, intermediate_size F, dtype: as MoELayer's."""

    def __init__(self, name, parent, experts):
        self.name, self.parent, self.experts = name, parent, experts
        self.attribute = name.rsplit(".", 1)[-1]
        self.top_k = None
        self._freed = []  # (parameter, shape)

    def parameters(self):
        return list(self.experts.parameters())

    def free(self):
        """Lets go of the weights' memory; the parameters stay the same objects."""
        for parameter in self.parameters():
            self._freed.append((parameter, parameter.shape))
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)

    def allocate(self):
        """Undoes free(), with undefined values: set_weights follows for every expert."""
        for parameter, shape in self._freed:
            parameter.data = parameter.data.new_empty(shape)
        self._freed = []

    def install(self, attached):
        setattr(self.parent, self.attribute, attached)

    def restore(self):
        setattr(self.parent, self.attribute, self.experts)

    def reference(self, hidden_states, top_k_index, top_k_weights):
        """What the experts of this block must compute, without a worker: [n, H], [n, k], [n, k] -> [n, H]."""
        y = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in top_k_index.unique().tolist():
            token, slot = torch.nonzero(top_k_index == expert, as_tuple=True)
            out = swiglu(hidden_states[token], *self.weights_of(expert))
            y.index_add_(0, token, out.float() * top_k_weights[token, slot, None].float())
        return y.to(hidden_states.dtype)

    def probe(self):
        """Yields reasons why this block is not plain SwiGLU experts; none when it is."""
        generator = torch.Generator().manual_seed(0)
        device = self.parameters()[0].device
        x = torch.randn(_PROBE_TOKENS, self.hidden_size, generator=generator).to(device, self.dtype)
        largest = max(float(functional.linear(x, self.weights_of(e)[0]).float().abs().max()) for e in (0, 1))
        ids = torch.rand(_PROBE_TOKENS, self.num_experts, generator=generator).topk(self.top_k).indices.to(device)
        weights = torch.rand(_PROBE_TOKENS, self.top_k, generator=generator).to(device, self.dtype)
        for scale in _PROBE_SCALES:
            scaled = x * (scale / max(largest, 1e-6))
            difference = self._difference(scaled, ids, weights)
            if not difference <= _TOLERANCE[self.dtype]:  # also when it is not a number
                yield (f"its output differs by {difference:.1e} of its largest value from SwiGLU experts, "
                       "W2 (silu(W1_gate x) * W1_up x), with FC1 outputs up to "
                       f"{scale:g}: another activation, clamp or routing")
                return


def _relative(mine, theirs):
    return float((mine.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp(min=1e-30))


class StackedBlock(Block):
    """Weights in two tensors for all experts."""

    def __init__(self, name, parent, experts):
        super().__init__(name, parent, experts)
        self.num_experts, _, self.hidden_size = experts.gate_up_proj.shape
        self.intermediate_size = experts.down_proj.shape[-1]
        self.dtype = experts.gate_up_proj.dtype

    @staticmethod
    def fits(module):
        return all(getattr(getattr(module, n, None), "ndim", 0) == 3 for n in ("gate_up_proj", "down_proj"))

    def differences(self):
        for name, parameter in self.experts.named_parameters():
            if name not in ("gate_up_proj", "down_proj"):
                yield f"{name}: a parameter besides gate_up_proj and down_proj"
        e, f, h = self.num_experts, self.intermediate_size, self.hidden_size
        for name, shape in (("gate_up_proj", (e, 2 * f, h)), ("down_proj", (e, h, f))):
            found = tuple(getattr(self.experts, name).shape)
            if found != shape:
                yield f"{name}: shape {list(found)} is not {list(shape)}, [E, 2F, H] and [E, H, F]"
        for name, (none, meaning) in _DIFFERENCES.items():
            if getattr(self.experts, name, none) != none:
                yield f"{name} is {getattr(self.experts, name)}: {meaning}"

    def weights_of(self, expert):
        return self.experts.gate_up_proj.data[expert], self.experts.down_proj.data[expert]

    def set_weights(self, expert, gate_up, down):
        self.experts.gate_up_proj.data[expert].copy_(gate_up)
        self.experts.down_proj.data[expert].copy_(down)

    def entries(self, weights):
        """(key, tensor) of the state dict for {expert: (gate_up, down)}."""
        for index, name in enumerate(("gate_up_proj", "down_proj")):
            yield name, torch.stack([weights[expert][index].to(self.dtype) for expert in range(self.num_experts)])

    def _difference(self, x, ids, weights):
        return _relative(self.reference(x, ids, weights), self.experts(x, ids, weights))


class ListBlock(Block):
    """A module per expert, each with three bias-free linear maps; the block around it routes the tokens."""

    def __init__(self, name, parent, experts):
        super().__init__(name, parent, experts)
        self.projections = next(names for names in _PROJECTIONS if hasattr(experts[0], names[0]))
        gate = getattr(experts[0], self.projections[0])
        self.num_experts = len(experts)
        self.intermediate_size, self.hidden_size = gate.weight.shape
        self.dtype = gate.weight.dtype
        self._has_moe = callable(getattr(parent, "moe", None))
        self._normalise = [bool(parent.norm_topk_prob)] if hasattr(parent, "norm_topk_prob") else [True, False]
        self._tuple = False

    @staticmethod
    def fits(module):
        return isinstance(module, nn.ModuleList) and len(module) > 1 and any(
            all(isinstance(getattr(module[0], name, None), nn.Module) for name in names) for names in _PROJECTIONS)

    def differences(self):
        f, h = self.intermediate_size, self.hidden_size
        for expert, module in enumerate(self.experts):
            for name, shape in zip(self.projections, ((f, h), (f, h), (h, f))):
                linear = getattr(module, name)
                if type(linear) is not nn.Linear:
                    yield f"{expert}.{name}: {type(linear).__name__} is not torch.nn.Linear"
                elif linear.bias is not None:
                    yield f"{expert}.{name}: has a bias"
                elif tuple(linear.weight.shape) != shape:
                    yield f"{expert}.{name}: shape {list(linear.weight.shape)} is not {list(shape)}"
        if not self._has_moe and type(getattr(self.parent, "gate", None)) is not nn.Linear:
            yield (f"{type(self.parent).__name__} has neither a method `moe` nor a torch.nn.Linear `gate`: how it routes "
                   "tokens is not known")

    def weights_of(self, expert):
        gate, up, down = (getattr(self.experts[expert], name).weight.data for name in self.projections)
        return torch.cat([gate, up]), down

    def set_weights(self, expert, gate_up, down):
        for name, value in zip(self.projections, (*gate_up.chunk(2), down)):
            getattr(self.experts[expert], name).weight.data.copy_(value)

    def entries(self, weights):
        for expert in range(self.num_experts):
            gate_up, down = weights[expert]
            for name, value in zip(self.projections, (*gate_up.chunk(2), down)):
                yield f"{expert}.{name}.weight", value.to(self.dtype, copy=True)

    def install(self, attached):
        super().install(attached)
        if self._has_moe:
            self.parent.moe = attached.forward
        else:
            self.parent.forward = types.MethodType(self._routed, self.parent)

    def restore(self):
        del self.parent.__dict__["moe" if self._has_moe else "forward"]
        super().restore()

    def _routed(self, parent, hidden_states, experts=None):
        """The forward of a block that routes with a linear gate: softmax, the k largest, normalised or not."""
        experts = experts or getattr(parent, self.attribute)
        jitter = getattr(parent, "jitter_noise", 0) or 0
        if parent.training and jitter > 0:
            hidden_states *= torch.empty_like(hidden_states).uniform_(1.0 - jitter, 1.0 + jitter)
        rows = hidden_states.reshape(-1, self.hidden_size)
        logits = parent.gate(rows)
        weights, ids = functional.softmax(logits, dim=-1, dtype=torch.float).topk(self.top_k, dim=-1)
        if self._normalise[0]:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        y = experts(rows, ids, weights.to(rows.dtype)).reshape(hidden_states.shape)
        return (y, logits) if self._tuple else y

    def _difference(self, x, ids, weights):
        if self._has_moe:
            return _relative(self.reference(x, ids, weights), self.parent.moe(x, ids, weights))
        theirs = self.parent(x[None])
        self._tuple = isinstance(theirs, tuple)
        theirs = theirs[0] if self._tuple else theirs
        found = []
        for normalise in self._normalise:
            self._normalise = [normalise]
            mine = self._routed(self.parent, x[None], self.reference)
            found.append((_relative(mine[0] if self._tuple else mine, theirs), normalise))
        self._normalise = [min(found)[1]]
        return min(found)[0]


def find_blocks(model):
    """The expert blocks of a model in order. Raises UnsupportedModel when there is none, or one that lrmoe cannot run,
    naming every difference."""
    modules = dict(model.named_modules())
    blocks, reasons = [], []
    for name, module in modules.items():
        form = next((form for form in (StackedBlock, ListBlock) if form.fits(module)), None)
        if form is not None and "." in name:
            block = form(name, modules[name.rsplit(".", 1)[0]], module)
            found = list(_examine(model, block))
            blocks.append(block)
            reasons += [f"{name} ({type(module).__name__}): {reason}" for reason in found]
        elif form is None and name.split(".")[-1] == "experts" and list(module.parameters()):
            reasons.append(f"{name} ({type(module).__name__}): neither gate_up_proj and down_proj [E, ., .] nor a list of "
                           "modules with gate_proj, up_proj and down_proj")
    if reasons:
        rest = f"; and {len(reasons) - _MAX_REASONS} more" if len(reasons) > _MAX_REASONS else ""
        raise UnsupportedModel("lrmoe cannot run the experts of this model: " + "; ".join(reasons[:_MAX_REASONS]) + rest)
    if not blocks:
        raise UnsupportedModel(f"{type(model).__name__} has no Mixture-of-Experts block in a form lrmoe knows")
    return blocks


def _examine(model, block):
    reasons = list(block.differences())
    for parameter in block.parameters():
        if parameter.device.type == "meta":
            reasons.append("its weights are not loaded (meta device)")
        elif type(parameter.data) is not torch.Tensor:
            reasons.append(f"its weights are {type(parameter.data).__name__}, not plain tensors")
        elif parameter.dtype not in _DTYPES:
            reasons.append(f"its weights are {parameter.dtype}, not one of {list(_DTYPES)}")
        else:
            continue
        break
    block.top_k = _top_k(model, block)
    if block.top_k is None:
        reasons.append("no top_k on the block or its router, and no num_experts_per_tok in the configuration")
    if reasons:
        return reasons
    was_training = block.parent.training
    block.parent.eval()  # no jitter, no dropout
    try:
        with torch.no_grad():
            return list(block.probe())
    finally:
        block.parent.train(was_training)


def _top_k(model, block):
    for module in (block.parent, *block.parent.children()):
        value = getattr(module, "top_k", None)
        if isinstance(value, int):
            return value
    return getattr(getattr(model, "config", None), "num_experts_per_tok", None)
