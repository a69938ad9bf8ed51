"""Numbers of a layer's forward passes, and which of them is being made again by activation checkpointing.

A framework that checkpoints activations calls the forward pass a second time from inside the backward pass. The worker
is told the same invocation then: the same plan, counted once, and the first pass's saved state dropped.
"""

import sys
from collections import deque

import torch

# Forward passes of one layer and step that may still be made again; older ones are forgotten.
_MAX_PENDING = 256
_graph_task = getattr(torch._C, "_current_graph_task_id", None)
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def inside_backward():
    """Whether this thread is inside an autograd backward pass."""
    if _graph_task is not None:
        return _graph_task() != -1
    frame = sys._getframe(1)  # PyTorch 1.13 has no such question: look for its checkpoint's recomputation
    while frame is not None:
        if frame.f_code.co_filename.endswith("checkpoint.py") and frame.f_code.co_name in ("backward", "unpack"):
            return True
        frame = frame.f_back
    return False


def made_again_later():
    """Whether the caller runs inside torch.utils.checkpoint(use_reentrant=False), so that the backward pass will make
    this forward again and nothing need be saved for it now. False when this PyTorch cannot tell."""
    hooks = _top_hooks(True) if _top_hooks is not None else None
    return bool(hooks) and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook.")


class Invocations:
    """The forward passes of one layer that are not done with."""

    def __init__(self):
        self._pending = deque(maxlen=_MAX_PENDING)  # (invocation, expert ids)

    def of(self, worker, layer, expert_idx):
        """(invocation, again): the number for a forward pass with these expert ids [..., k]; again when it is that of
        an earlier pass. Ids tell passes apart that are open at the same time; the latest pass that has them counts."""
        self._forget_before(worker.step)
        if self._pending and torch.is_tensor(expert_idx) and inside_backward():
            for invocation, ids in reversed(self._pending):
                if ids.shape == expert_idx.shape and torch.equal(ids, expert_idx):
                    return invocation, True
        return worker._next_invocation(layer), False

    def opened(self, invocation, expert_idx):
        """A forward pass that may be made again."""
        self._pending.append((invocation, expert_idx))

    def done(self, invocation):
        """Its backward pass is over, or it was given up."""
        if len(self._pending) == 1 and self._pending[0][0] == invocation:  # the usual case, without building a deque
            self._pending.clear()
        elif self._pending:
            self._pending = deque((entry for entry in self._pending if entry[0] != invocation), maxlen=_MAX_PENDING)

    def _forget_before(self, step):
        while self._pending and self._pending[0][0].step < step:
            self._pending.popleft()
