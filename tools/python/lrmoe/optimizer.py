"""The optimizer of the experts. It runs in the workers; this is its handle."""

import math

import torch


class AdamW(torch.optim.Optimizer):
    """AdamW over all experts of all layers, with fp32 master weights and moments in the workers.

    A torch.optim.Optimizer, so that learning-rate schedulers work; it has one parameter group, whose `lr`, `betas`,
    `eps` and `weight_decay` count when step() is called. The same update as torch.optim.AdamW. The dense parameters
    of the model need an optimizer of their own.

    Expert gradients are *sums* over the tokens of all ranks. When every rank's loss is a mean over its own tokens,
    step(gradient_scale=1 / worker.world_size) makes them the gradient of the mean over ranks, which is what averaging
    dense gradients over ranks gives.

    Moments are saved by worker.save_checkpoint(), not by state_dict(), which holds the parameter group only.
    """

    def __init__(self, worker, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        for name, value, low, high in (("lr", lr, 0.0, math.inf), ("betas[0]", betas[0], 0.0, 1.0),
                                       ("betas[1]", betas[1], 0.0, 1.0), ("eps", eps, 0.0, math.inf),
                                       ("weight_decay", weight_decay, 0.0, math.inf)):
            if not low <= value < high:
                raise ValueError(f"{name}: {value} is not within [{low}, {high})")
        self._worker = worker
        # torch wants a parameter; the real ones are in the workers.
        super().__init__([torch.zeros(0, requires_grad=True)],
                         dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None, *, gradient_scale=1.0):
        """Collective. Updates every expert once; gradients are multiplied by gradient_scale first and stay as they are.
        Layers count micro-batches from 0 again. Returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        self._worker._optimizer_step(
            lr=float(group["lr"]), beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
            weight_decay=group["weight_decay"], gradient_scale=float(gradient_scale))
        return loss

    def zero_grad(self, set_to_none=True):
        """Collective. Expert gradients are zero afterwards; set_to_none makes no difference."""
        self._worker._call("ZeroGradients")

    def grad_norm(self):
        """Collective. The L2 norm of all experts' accumulated gradients over all layers and ranks, the same on every
        rank."""
        return math.sqrt(self._worker._call("GradientNorm").squared_norm)

    def add_param_group(self, param_group):
        if self.param_groups:
            raise ValueError("lrmoe.AdamW has one parameter group: the experts")
        super().add_param_group(param_group)


def clip_grad_norm_(parameters, optimizer, max_norm, *, gradient_scale=1.0):
    """Collective. Clips the gradient norm of dense parameters and experts together, as torch's function of that name.

    parameters: dense parameters, replicated over ranks, with their gradients already averaged.
    optimizer: the lrmoe.AdamW of the experts. gradient_scale: what its step would have been given.
    Returns (total norm before, gradient_scale for the step): dense gradients are scaled in place, experts by the step.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    squared = sum(float(g.detach().float().pow(2).sum()) for g in gradients)
    squared += (optimizer.grad_norm() * gradient_scale) ** 2
    norm = math.sqrt(squared)
    factor = min(1.0, max_norm / (norm + 1e-6))
    if factor < 1.0:
        for gradient in gradients:
            gradient.detach().mul_(factor)
    return norm, gradient_scale * factor
