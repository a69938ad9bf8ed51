"""One rank of the quickstart's training. Started by `lrmoe-worker ... -- python3 train.py ...`, once per rank.

Writes OUT/rank-R.jsonl: one line per step with the loss of this rank and, per MoE layer, what the worker reported.
"""

import argparse
import json
import math
import os
import sys
import time

import torch
import torch.distributed as dist

import lrmoe
from model import Gpt
from text import Text, seed_of

VALIDATION_BATCHES = 8
WARMUP_FRACTION = 0.1


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True, help="prepared text, see text.py")
    parser.add_argument("--out", required=True)
    parser.add_argument("--arm", required=True, help="name for the progress lines")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--length", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--intermediate-size", type=int, default=128)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the experts")
    options = parser.parse_args()
    options.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    return options


class DenseGradients:
    """Averages the gradients of the dense parameters over ranks, with the loss, in one exchange."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.bucket = torch.zeros(sum(p.numel() for p in self.parameters) + 1)

    def average(self, loss):
        torch.cat([p.grad.flatten() for p in self.parameters] + [loss.detach().view(1)], out=self.bucket)
        dist.all_reduce(self.bucket)
        self.bucket /= dist.get_world_size()
        offset = 0
        for p in self.parameters:
            p.grad.copy_(self.bucket[offset:offset + p.numel()].view_as(p))
            offset += p.numel()
        return float(self.bucket[-1])


def learning_rate(steps):
    """Linear warm-up, then a cosine to a tenth."""
    warmup = max(1, int(steps * WARMUP_FRACTION))

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    return factor


def record_of(plan):
    return {
        "retention_rate": plan.retention_rate, "imbalance_before": plan.imbalance.before,
        "imbalance_forward": plan.imbalance.forward, "imbalance_backward": plan.imbalance.backward,
        "planned_kept_rows": plan.kept_rows, "planned_routed_rows": plan.routed_rows,
        "routed_rows": plan.rank_routed_rows, "kept_rows": plan.rank_kept_rows,
        "backward_rows": plan.rank_backward_rows, "new_replicas": plan.new_replicas, "plan_ms": plan.plan_us / 1000,
        "forward_ms": plan.forward_ms, "backward_ms": plan.backward_ms, "peak_bytes": plan.peak_bytes,
        "predicted_bytes": plan.predicted_bytes, "kept_score": plan.kept_score, "total_score": plan.total_score,
    }


def validate(model, text, options):
    """Mean loss over the same validation batches on every arm; the layers run in evaluation mode."""
    model.eval()
    total = torch.zeros(1)
    with torch.no_grad():
        for index in range(VALIDATION_BATCHES):
            seed = seed_of(options.seed + 77, index, dist.get_rank())
            total += model(*Text.batch(text.validation, options.batch_size, options.length, seed))
    model.train()
    dist.all_reduce(total)
    return float(total) / VALIDATION_BATCHES / dist.get_world_size()


def progress(options, step, steps, loss, layers, tokens_per_s):
    plans = [layer.last_plan for layer in layers]
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    print(f"[{options.arm}] step {step:4d}/{steps}  loss {loss:6.4f}  {tokens_per_s:6.0f} tokens/s  "
          f"retention {mean([p.retention_rate for p in plans]):.3f}  "
          f"imbalance {mean([p.imbalance.before for p in plans]):.2f} -> "
          f"{mean([p.imbalance.backward for p in plans]):.2f}  "
          f"kept {sum(p.kept_rows for p in plans)}/{sum(p.routed_rows for p in plans)} rows", flush=True)


def train(options, worker, rank, world_size, log):
    text = Text(options.text)
    model = Gpt(worker, options, options.seed)
    layers = model.moe_layers()
    dense = DenseGradients(model.parameters())
    dense_optimizer = torch.optim.AdamW(dense.parameters, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    expert_optimizer = lrmoe.AdamW(worker, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate(options.steps))
                 for optimizer in (dense_optimizer, expert_optimizer)]
    tokens_per_step = options.batch_size * options.length * world_size
    for step in range(options.steps):
        started = time.perf_counter()
        loss = model(*Text.batch(text.training, options.batch_size, options.length, seed_of(options.seed, step, rank)))
        dense_optimizer.zero_grad()
        expert_optimizer.zero_grad()
        loss.backward()
        mean_loss = dense.average(loss)
        norm, scale = lrmoe.clip_grad_norm_(dense.parameters, expert_optimizer, options.max_norm,
                                            gradient_scale=1 / world_size)
        dense_optimizer.step()
        expert_optimizer.step(gradient_scale=scale)
        for schedule in schedules:
            schedule.step()
        seconds = time.perf_counter() - started
        log({"step": step, "loss": mean_loss, "norm": norm, "seconds": seconds, "tokens": tokens_per_step,
             "layers": [record_of(layer.last_plan) for layer in layers]})
        if rank == 0 and (step + 1 == options.steps or step % 10 == 0):
            progress(options, step, options.steps, mean_loss, layers, tokens_per_step / seconds)
        if not math.isfinite(mean_loss):
            raise SystemExit(f"step {step}: loss is {mean_loss}")
    validation_loss = validate(model, text, options)
    log({"validation_loss": validation_loss})
    if rank == 0:
        print(f"[{options.arm}] validation loss {validation_loss:.4f}", flush=True)


def main():
    options = parse_options()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    try:
        with open(os.path.join(options.out, f"rank-{rank}.jsonl"), "w") as file, lrmoe.connect() as worker:
            train(options, worker, rank, world_size, lambda record: file.write(json.dumps(record) + "\n"))
    except lrmoe.Error as error:
        print(f"[{options.arm}] rank {rank}: {error}", file=sys.stderr, flush=True)
        return 1
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    # Not sys.exit: a process group with a dead peer would hold the interpreter up.
    status = main()
    sys.stdout.flush()
    os._exit(status)
