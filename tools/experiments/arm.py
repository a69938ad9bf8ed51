"""One rank of one run. Started by `lrmoe-worker ... -- python3 arm.py ...`.

Writes OUT/result-RANK.json: the loss of every step (the mean over ranks), per step the MoE layers' processor time, and at the
end the validation loss; OUT/state.pt with --save; OUT/gradients.pt in a probe.
"""

import argparse
import json
import math
import os
import sys

import torch
import torch.distributed as dist

import lrmoe
from model import Gpt
from text import Text, seed_of
from train import DenseGradients, learning_rate, record_of

VALIDATION_BATCHES = 8
PROBE_BATCHES = (1, 32)  # the gradient summed over so many batches is kept
ROWS = 64  # sequences of the small text: one epoch is ROWS / (batch size * ranks) steps


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--regime", required=True)
    parser.add_argument("--large-text", required=True)
    parser.add_argument("--small-text", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--start", help="state.pt of another run")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--probe-small", action="store_true", help="probe with the small text")
    options = parser.parse_args()
    model = dict(num_layers=2, num_experts=16, top_k=4, hidden_size=128, intermediate_size=64, num_heads=4, length=64,
                 dtype=torch.float32)
    for name, value in model.items():
        setattr(options, name, value)
    options.batch_size, options.lr = 8, {"tune": 1e-3, "timed": 1e-3}.get(options.regime, 2e-3)
    return options


class Batches:
    """(inputs, targets) of every step; the same in all arms of a seed."""

    def __init__(self, options, rank):
        self.options, self.rank = options, rank
        self.large = Text(options.large_text)
        small = Text(options.small_text).training
        generator = torch.Generator().manual_seed(options.seed)
        starts = torch.randint(len(small) - options.length - 1, (ROWS,), generator=generator)
        self.rows = torch.stack([small[start:start + options.length + 1] for start in starts.tolist()])

    def small(self, step):
        size, ranks = self.options.batch_size, dist.get_world_size()
        per_epoch = ROWS // (size * ranks)
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.options.seed * 7919 + step // per_epoch))
        chosen = self.rows[order.view(per_epoch, ranks, size)[step % per_epoch, self.rank]]
        return chosen[:, :-1].contiguous(), chosen[:, 1:].contiguous()

    def training(self, step, small):
        if small:
            return self.small(step)
        return Text.batch(self.large.training, self.options.batch_size, self.options.length,
                          seed_of(self.options.seed, step, self.rank))

    def validation(self, index, small):
        if small:  # what it is to have learnt by heart
            return self.small(index)
        return Text.batch(self.large.validation, self.options.batch_size, self.options.length,
                          seed_of(self.options.seed + 77, index, self.rank))


def load_state(path, model):
    state = torch.load(path)
    model.load_state_dict(state["dense"])
    for layer, experts in zip(model.moe_layers(), state["experts"]):
        layer.load_each(lambda expert, experts=experts: experts[expert])


def save_state(path, model):
    torch.save({"dense": model.state_dict(), "experts": [layer.expert_weights() for layer in model.moe_layers()]}, path)


def validate(model, batches, small):
    model.eval()
    total = torch.zeros(1)
    with torch.no_grad():
        for index in range(VALIDATION_BATCHES):
            total += model(*batches.validation(index, small))
    model.train()
    dist.all_reduce(total)
    return float(total) / VALIDATION_BATCHES / dist.get_world_size()


def probe(options, model, batches):
    """Gradients of the same weights, summed over the first 1 and 32 batches: what updates would be made of. What an arm's
    gradient lacks by chance averages out over batches, what it lacks always does not."""
    gradients = {}
    for step in range(PROBE_BATCHES[-1]):
        model(*batches.training(step, options.probe_small)).backward()
        if step + 1 in PROBE_BATCHES:
            experts = [part.flatten() for layer in model.moe_layers() for parts in layer.expert_gradients().values()
                       for part in parts]
            gradients[step + 1] = {"experts": torch.cat(experts),
                                   "dense": torch.cat([p.grad.flatten() for p in model.parameters()])}
    torch.save(gradients, os.path.join(options.out, "gradients.pt"))


def count_experts(layers, num_experts):
    """{layer: routed pairs by expert of its last forward}, kept up to date by hooks."""
    counts = {}

    def hook(layer, inputs):
        counts[layer.layer] = torch.bincount(inputs[1].flatten(), minlength=num_experts).tolist()
    for layer in layers:
        layer.register_forward_pre_hook(hook)
    return counts


def train(options, worker, model, batches):
    small = options.regime in ("tune", "timed")
    layers = model.moe_layers()
    counts = count_experts(layers, options.num_experts) if options.regime == "timed" else None
    dense = DenseGradients(model.parameters())
    settings = dict(lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = lrmoe.JointOptimizer(torch.optim.AdamW(dense.parameters, **settings), lrmoe.AdamW(worker, **settings),
                                     max_norm=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate(options.steps))
    result = {"loss": [], "moe_cpu_ms": [], "kept": 0, "routed": 0, "kept_score": 0.0, "total_score": 0.0, "counts": []}
    for step in range(options.steps):
        loss = model(*batches.training(step, small))
        optimizer.zero_grad()
        loss.backward()
        result["loss"].append(dense.average(loss))
        optimizer.step()
        schedule.step()
        if counts is not None:
            result["counts"].append([counts[layer.layer] for layer in layers])
        plans = [record_of(layer.last_plan) for layer in layers]
        result["moe_cpu_ms"].append([[plan["forward_ms"]["cpu"], plan["backward_ms"]["cpu"]] for plan in plans])
        for plan in plans:
            result["kept"] += plan["kept_rows"]
            result["routed"] += plan["routed_rows"]
            result["kept_score"] += plan["kept_score"]
            result["total_score"] += plan["total_score"]
        if not math.isfinite(result["loss"][-1]):
            raise SystemExit(f"step {step}: loss is {result['loss'][-1]}")
    result["validation_loss"] = validate(model, batches, small)
    return result


def main():
    options = parse_options()
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        with lrmoe.connect() as worker:
            model = Gpt(worker, options, options.seed)
            if options.start:
                load_state(options.start, model)
            batches = Batches(options, rank)
            if options.regime == "probe":
                probe(options, model, batches)
                result = {}
            else:
                result = train(options, worker, model, batches)
            if options.save:
                save_state(os.path.join(options.out, "state.pt"), model)
            with open(os.path.join(options.out, f"result-{rank}.json"), "w") as file:
                json.dump(result, file)
    except lrmoe.Error as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a process group with a dead peer would hold the interpreter up
