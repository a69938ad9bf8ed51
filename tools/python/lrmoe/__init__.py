"""lrmoe: the Mixture-of-Experts layers of a PyTorch model, run by lrmoe workers.

    worker = lrmoe.connect()
    layer = lrmoe.MoELayer(worker, layer=0, num_experts=16, top_k=4, hidden_size=256, intermediate_size=128)
    layer.load_experts(gate_up, down)
    y = layer(x, expert_idx, weights)
    opt = lrmoe.AdamW(worker, lr=3e-4, weight_decay=0.1)
"""

from .attachment import attach, detach, gather
from .errors import Error, UnsupportedModel, WorkerLost
from .joint_optimizer import JointOptimizer
from .layer import MoELayer
from .optimizer import AdamW, clip_grad_norm_
from .plan import Imbalance, Plan
from .worker import Worker, connect

__version__ = "0.1.0"
__all__ = ["AdamW", "Error", "Imbalance", "JointOptimizer", "MoELayer", "Plan", "UnsupportedModel", "Worker", "WorkerLost",
           "attach", "clip_grad_norm_", "connect", "detach", "gather"]


def __getattr__(name):
    if name == "TrainerCallback":  # needs transformers
        from .trainer_callback import TrainerCallback
        return TrainerCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
