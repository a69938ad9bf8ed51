"""One optimizer for a whole model: the dense parameters' own and the experts', stepped and clipped together."""

import torch

from .optimizer import clip_grad_norm_


class JointOptimizer(torch.optim.Optimizer):
    """A dense optimizer and an lrmoe.AdamW as one torch.optim.Optimizer, for code that has room for one: transformers'
    Trainer, Accelerate, a learning-rate scheduler.

    dense: any torch optimizer over model.parameters(). experts: the lrmoe.AdamW.
    max_norm: clips the gradient norm of dense parameters and experts together in step(), as one vector; None: does not.
      Turn the framework's own clipping off then (max_grad_norm=0 in TrainingArguments): it sees dense parameters only.
    average: whether dense gradients are averages over ranks by the time of step(), as DistributedDataParallel leaves them;
      expert gradients, which are sums over ranks, are then divided by the number of ranks.

    step() is collective and zeroes the experts' gradients behind the update, because frameworks zero model.parameters()
    only. last_norm: the total norm before clipping of the last step, None without max_norm.

    Param groups are the dense optimizer's followed by the experts' (learning rates and weight decay may differ). The state
    dict holds the dense state and the experts' settings; their moments are in worker.save_checkpoint().
    """

    def __init__(self, dense, experts, *, max_norm=None, average=True):
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm: {max_norm} is not positive")
        self.dense, self.experts = dense, experts
        self.max_norm, self.last_norm = max_norm, None
        self._scale = 1 / experts._worker.world_size if average else 1.0
        super().__init__([torch.zeros(0, requires_grad=True)], {})
        self.param_groups = [*dense.param_groups, *experts.param_groups]  # the same objects: schedulers reach both
        self.state = dense.state

    def step(self, closure=None):
        """Collective. Clips, updates dense parameters and experts, and zeroes the experts' gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = self._scale
        if self.max_norm is not None:
            parameters = [p for group in self.dense.param_groups for p in group["params"]]
            self.last_norm, scale = clip_grad_norm_(parameters, self.experts, self.max_norm, gradient_scale=scale)
        self.dense.step()
        self.experts.step(gradient_scale=scale)
        self.experts.zero_grad()
        return loss

    def zero_grad(self, set_to_none=True):
        """Collective."""
        self.dense.zero_grad(set_to_none)
        self.experts.zero_grad()

    def state_dict(self):
        return {"dense": self.dense.state_dict(), "experts": self.experts.state_dict()}

    def load_state_dict(self, state_dict):
        self.dense.load_state_dict(state_dict["dense"])
        self.experts.load_state_dict(state_dict["experts"])
        self.param_groups = [*self.dense.param_groups, *self.experts.param_groups]
        self.state = self.dense.state

    def add_param_group(self, param_group):
        if not hasattr(self, "param_groups") or not self.param_groups:
            super().add_param_group(param_group)  # the base class's own
            return
        self.dense.add_param_group(param_group)
        self.param_groups = [*self.dense.param_groups, *self.experts.param_groups]


