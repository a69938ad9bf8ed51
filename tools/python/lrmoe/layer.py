"""The expert layer as a torch module."""

import struct

import torch
from torch.autograd.function import once_differentiable

from . import protocol
from .errors import Error, WorkerLost
from .invocations import Invocations, made_again_later
from .plan import plan_from_summary

_COMPUTE_TYPES = {torch.bfloat16: protocol.DATA_TYPE_BF16, torch.float32: protocol.DATA_TYPE_FP32}
_ACTIVATIONS = {"silu": protocol.ACTIVATION_SILU, "gelu": protocol.ACTIVATION_GELU}
_INDEX_TYPES = (torch.int64, torch.int32)
_INT32_MAX = 2**31 - 1
_NUMBER = struct.Struct("=qqq")  # of an invocation


class MoELayer(torch.nn.Module):
    """The experts of one MoE layer, executed by the workers of the job.

    y_t = sum over u of weights[t, u] * W2 (silu(W1_gate x_t) * W1_up x_t), over the k chosen experts of token t. Every
    pair is computed in the forward pass; the backward pass computes the pairs the plan keeps, see last_plan and
    last_kept. Router, shared experts and losses stay in the framework.

    worker: from lrmoe.connect(). layer: index, 0..; every layer of a model has its own and all have one shape.
    num_experts E, top_k k, hidden_size H, intermediate_size F. dtype: compute type, bfloat16 or float32.
    gated: False for plain experts W2 activation(W1 x); activation "silu" or "gelu" (gated experts: "silu").

    The module has no torch parameters: the experts are the workers', and lrmoe.AdamW updates them.
    """

    def __init__(self, worker, layer, num_experts, top_k, hidden_size, intermediate_size, dtype=torch.bfloat16, *,
                 gated=True, activation="silu"):
        super().__init__()
        if dtype not in _COMPUTE_TYPES:
            raise ValueError(f"dtype: {dtype} is not one of {list(_COMPUTE_TYPES)}")
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation: {activation!r} is not one of {list(_ACTIVATIONS)}")
        if layer < 0:
            raise ValueError(f"layer: {layer} is negative")
        self.layer, self.num_experts, self.top_k = layer, num_experts, top_k
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.dtype, self.gated, self.activation = dtype, gated, activation
        self._worker = worker
        # Makes autograd call backward even where no input needs a gradient: the experts always do.
        self._anchor = torch.zeros((), requires_grad=True)
        self._last = _Last()
        self._invocations = Invocations()
        worker._register(self)
        if hasattr(torch, "compiler"):
            # torch.compile breaks its graph here: it can neither trace the calls nor must it repeat them.
            self.forward = torch.compiler.disable(self.forward)

    def load_experts(self, gate_up, down):
        """Collective. Sets the weights of this layer.

        gate_up: [E, 2F, H], gate rows then up rows (plain experts: [E, F, H]); down: [E, H, F]; float32, or bfloat16.
        Each rank keeps its own experts' part, in fp32 masters and in the compute type. Before the session is attached
        (see lrmoe.connect) a copy is kept and errors come with the first use."""
        self._worker._load_or_defer(self, gate_up, down)

    def load_each(self, weights_of):
        """Collective. As load_experts, without all experts in one tensor: weights_of(expert) gives gate_up [2F, H] and
        down [H, F] and is asked for this rank's own experts only. Attaches the session, see lrmoe.connect."""
        self._worker._attach()
        self._load_owned(weights_of)

    def forward(self, x, expert_idx, weights):
        """Collective. x: [..., H], any float type; expert_idx: [..., k], int64 or int32, within 0..E-1 and distinct
        within a token; weights: [..., k], any float type, finite. Returns y [..., H] in x's type and on its device.

        Ranks may have different numbers of tokens, also none. Gradients go to x and weights, in their types. Under
        torch.no_grad() or in eval() mode nothing is saved for a backward pass. In training each result must take part
        in the loss on every rank, or be given up with discard().

        Raises lrmoe.Error on every rank when one rank's arguments are refused, lrmoe.WorkerLost within a second of the
        worker's death."""
        trains = self.training and torch.is_grad_enabled()
        return _Experts.apply(self._anchor, x, weights, expert_idx, self, trains, trains and not made_again_later())

    def discard(self):
        """Collective. Gives up the last forward pass when no backward follows it (an exception, say); without this its
        saved state lives until a forward of a later step."""
        if self._last.summary is not None:
            self._invocations.done(self._last.summary[0])
            self._worker._call("Discard", invocation=self._last.summary[0])

    @property
    def last_plan(self):
        """lrmoe.Plan of the last invocation: retention_rate, imbalance, kept_rows, timings; None before the first. After
        the backward pass its figures are included."""
        return None if self._last.summary is None else plan_from_summary(*self._last.summary)

    @property
    def last_kept(self):
        """bool [..., k]: which of this rank's pairs the last backward pass kept; None before the first."""
        return self._last.kept

    def expert_weights(self):
        """{expert: (gate_up [2F, H], down [H, F])} of the experts this rank owns, their fp32 masters, copied."""
        return self._export(protocol.EXPERT_CONTENT_WEIGHTS)

    def expert_gradients(self):
        """{expert: (gate_up [2F, H], down [H, F])} of the experts this rank owns: fp32 gradients accumulated since
        the last AdamW.zero_grad(), copied."""
        return self._export(protocol.EXPERT_CONTENT_GRADIENT)

    def extra_repr(self):
        return (f"layer={self.layer}, num_experts={self.num_experts}, top_k={self.top_k}, "
                f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, dtype={self.dtype}")

    def __deepcopy__(self, memo):
        raise TypeError("an MoELayer cannot be copied: its experts are the workers'")

    def _model_spec(self, num_layers):
        return protocol.ModelSpec(
            num_layers=num_layers, num_experts=self.num_experts, top_k=self.top_k, hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size, gated=self.gated, activation=_ACTIVATIONS[self.activation],
            dtype=_COMPUTE_TYPES[self.dtype])

    def _expert_shapes(self):
        rows = (2 if self.gated else 1) * self.intermediate_size
        return (rows, self.hidden_size), (self.hidden_size, self.intermediate_size)

    def _load_stacked(self, gate_up, down):
        def weights_of(expert):
            for name, tensor, shape in zip(("gate_up", "down"), (gate_up, down), self._expert_shapes()):
                if tuple(tensor.shape) != (self.num_experts, *shape):
                    raise Error("INVALID_ARGUMENT", f"{name}: shape {list(tensor.shape)} is not "
                                f"{[self.num_experts, *shape]}")
            return gate_up[expert], down[expert]
        self._load_owned(weights_of)

    def _load_owned(self, weights_of):
        failure = None
        try:
            for expert in self._worker.owned_experts:
                self._load_one(expert, *weights_of(expert))
        except Error as error:
            failure = error
        self._worker._parameter_changes += 1
        # Also after a failure: the other ranks wait for this rank here, and learn from it.
        try:
            self._worker._call("FinishLoad", layer=self.layer)
        except Error as error:
            raise failure or error from None
        if failure is not None:
            raise failure

    def _load_one(self, expert, gate_up, down):
        tensors = self._worker._tensors()
        for name, tensor, shape in zip(("gate_up", "down"), (gate_up, down), self._expert_shapes()):
            if tuple(tensor.shape) != shape:
                raise Error("INVALID_ARGUMENT", f"{name} of expert {expert}: shape {list(tensor.shape)} is not "
                            f"{list(shape)}")
        dtype = torch.bfloat16 if gate_up.dtype == down.dtype == torch.bfloat16 else torch.float32
        if dtype != self.dtype:
            dtype = torch.float32  # what every worker takes
        first, second = tensors.share(gate_up, dtype), tensors.share(down, dtype)
        self._worker._call("LoadExpert", layer=self.layer, expert=expert, gate_up=tensors.descriptor(first),
                           down=tensors.descriptor(second))

    def _export_one(self, expert, content=protocol.EXPERT_CONTENT_WEIGHTS):
        """(gate_up [2F, H], down [H, F]) of an owned expert, fp32, in shared memory."""
        tensors = self._worker._tensors()
        parts = tuple(tensors.empty(shape, torch.float32) for shape in self._expert_shapes())
        self._worker._call("ExportExpert", layer=self.layer, expert=expert, content=content,
                           gate_up=tensors.descriptor(parts[0]), down=tensors.descriptor(parts[1]))
        return parts

    def _export(self, content):
        return {expert: tuple(part.clone() for part in self._export_one(expert, content))
                for expert in self._worker.owned_experts}

    def _inputs(self, x, expert_idx, weights):
        """(expert_idx, weights) in shared memory, leading dimensions flattened; (None, reason) when the inputs cannot be
        sent.

        Shapes are the worker's to judge: what it refuses, it refuses on all ranks at once."""
        for name, tensor, wanted, good in (
                ("x", x, "a float tensor", torch.is_tensor(x) and x.is_floating_point()),
                ("expert_idx", expert_idx, "an int64 or int32 tensor",
                 torch.is_tensor(expert_idx) and expert_idx.dtype in _INDEX_TYPES),
                ("weights", weights, "a float tensor", torch.is_tensor(weights) and weights.is_floating_point())):
            if not good:
                found = tensor.dtype if torch.is_tensor(tensor) else type(tensor).__name__
                return None, f"{name}: {found} is not {wanted}"
            if tensor.dim() == 0:
                return None, f"{name}: a scalar has no last dimension"
        tensors = self._worker._tensors()
        # Clamped, not wrapped: an id beyond int32 stays out of range.
        idx = expert_idx if expert_idx.dtype == torch.int32 else expert_idx.clamp(-1, _INT32_MAX)
        return [tensors.share(_rows(t), dtype) for t, dtype in ((idx, torch.int32), (weights, torch.float32))], None

    def _forward(self, tensors, invocation, evaluation, x, expert_idx, weights):
        """The Forward call: (y, response)."""
        inputs, reason = self._inputs(x, expert_idx, weights)
        if inputs is None:
            # The other ranks are in this call already: take part with a request the worker refuses on all of them.
            try:
                self._worker._call("Forward", invocation=invocation, evaluation=evaluation)
            except Error as error:
                if isinstance(error, WorkerLost):
                    raise
                raise Error(error.code, f"{reason} ({error.message})") from None
            raise Error("INTERNAL", f"{reason}, and the worker took it")
        idx, alpha = inputs
        pool, rows, y = self._worker._place_rows(_rows(x), self.dtype, (*x.shape[:-1], self.hidden_size))
        response = self._worker._call_with(
            pool, rows, y, "Forward", invocation=invocation, evaluation=evaluation, x=pool.descriptor(rows),
            expert_idx=tensors.descriptor(idx), alpha=tensors.descriptor(alpha),
            y=pool.descriptor(y, (rows.shape[0], self.hidden_size)))
        return y, response


class _Last:
    """Of a layer's last invocation. An object of its own: setting an attribute of a Module takes microseconds."""
    summary = None  # (invocation, InvocationSummary)
    kept = None


def _rows(tensor):
    if tensor.dim() == 2:
        return tensor
    return tensor.reshape(-1 if tensor.numel() else tensor.shape[:-1].numel(), tensor.shape[-1])


class _Experts(torch.autograd.Function):
    """Forward and Backward calls of one invocation."""

    @staticmethod
    def forward(ctx, anchor, x, weights, expert_idx, layer, trains, saves):
        tensors = layer._worker._tensors()
        invocation, again = layer._invocations.of(layer._worker, layer.layer, expert_idx)
        try:
            y, response = layer._forward(tensors, invocation, not saves, x, expert_idx, weights)
        except Error as error:
            if not again:
                layer._worker._return_invocation(invocation, error)
            raise
        if layer.training and not again:
            layer._invocations.opened(invocation, expert_idx)
        layer._last.summary = (invocation, response.summary)
        ctx.layer, ctx.trains = layer, trains
        # Saved as a tensor: under checkpointing autograd then hands the backward that of the pass made again.
        number = bytearray(_NUMBER.pack(invocation.step, invocation.layer, invocation.micro_batch))
        ctx.save_for_backward(torch.frombuffer(number, dtype=torch.int64))
        ctx.x_like = (x.shape, x.dtype, x.device)
        ctx.weights_like = (weights.shape, weights.dtype, weights.device)
        return y.to(device=x.device, dtype=x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        layer, worker = ctx.layer, ctx.layer._worker
        if not ctx.trains:
            raise Error("FAILED_PRECONDITION", f"layer {layer.layer} was called in eval() mode, which saves nothing for a "
                        "backward pass")
        step, index, micro_batch = ctx.saved_tensors[0].tolist()  # under checkpointing this makes the forward again
        invocation = protocol.Invocation(step=step, layer=index, micro_batch=micro_batch)
        tensors = worker._tensors()
        x_shape, x_dtype, x_device = ctx.x_like
        pool, rows, dx = worker._place_rows(_rows(dy), layer.dtype, x_shape)
        weights_shape, weights_dtype, weights_device = ctx.weights_like
        pairs = (rows.shape[0], layer.top_k)
        dalpha = tensors.empty(weights_shape, torch.float32)
        kept = tensors.empty(weights_shape, torch.uint8)
        layer._invocations.done(invocation)
        response = worker._call_with(
            pool, rows, dx, "Backward", invocation=invocation, dy=pool.descriptor(rows),
            dx=pool.descriptor(dx, rows.shape), dalpha=tensors.descriptor(dalpha, pairs),
            kept=tensors.descriptor(kept, pairs))
        layer._last.summary = (invocation, response.summary)
        layer._last.kept = kept.view(torch.bool)
        grad_x = dx.to(device=x_device, dtype=x_dtype) if ctx.needs_input_grad[1] else None
        grad_weights = dalpha.to(device=weights_device, dtype=weights_dtype) if ctx.needs_input_grad[2] else None
        return None, grad_x, grad_weights, None, None, None, None
