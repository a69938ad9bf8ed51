"""A memory budget in which the full backward pass does not fit, found with the product's own planner.

The demand recorded in the first arm is planned again by lrmoe-sim, once with every row kept and once at the lowest
retention rate, without a limit. The budget lies between what the two need, so that Algorithm 1 must drop rows and can.
"""

import json
import os
import subprocess

# Where between the need at the lowest rate (0) and that with every row (1).
POSITION = 0.6
MAX_SAMPLES = 24


class NoBudget(RuntimeError):
    pass


def demand(plan, num_experts, ranks):
    """counts [source][expert] of a plan as lrmoectl shows it."""
    counts = [[0] * num_experts for _ in range(ranks)]
    for instance in plan["instances"]:
        for source, rows in enumerate(instance["forward_rows_by_source"]):
            counts[source][instance["expert"]] += rows
    return counts


def _plan(bin_dir, folder, problem):
    path = os.path.join(folder, "problem.json")
    with open(path, "w") as file:
        json.dump(problem, file)
    done = subprocess.run([os.path.join(bin_dir, "lrmoe-sim"), "plan", "--input", path, "--policy", "lrmoe", "--output",
                           "json"], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise NoBudget(f"lrmoe-sim plan --input {path}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def packs_weights(plan, shape):
    """Whether the workers hold weights packed, once per direction, by what the plan counts for the experts."""
    parameters = 3 * shape["hidden_size"] * shape["intermediate_size"]
    experts = sum(rank["memory_bytes"]["experts"] for rank in plan["ranks"])
    forms = (experts / (shape["num_experts"] * parameters) - 4) / shape["weight_bytes"]
    if forms not in (1, 2):
        raise NoBudget(f"the recorded plan counts {experts} bytes for {shape['num_experts']} experts of {parameters} "
                       "parameters; expected the weights once or twice and an fp32 gradient")
    return forms == 2


def _needed(bin_dir, folder, counts, shape, replica_slots, rate):
    """Bytes of the fullest rank for one layer at this retention rate."""
    problem = {
        "format": "lrmoe-planning-problem", "version": 1, "counts": counts,
        "owner": [expert * len(counts) // shape["num_experts"] for expert in range(shape["num_experts"])],
        "ranks": [{"node": 0, "replica_slots": replica_slots} for _ in counts],
        "model": {"hidden_size": shape["hidden_size"], "intermediate_size": shape["intermediate_size"], "gated": True,
                  "weight_bytes": shape["weight_bytes"], "gradient_bytes": 4,
                  "packs_weights": shape["packs_weights"]},
        "rates": [rate],
    }
    return max(rank["memory_bytes"]["total"] for rank in _plan(bin_dir, folder, problem)["ranks"])


def choose(bin_dir, folder, plans, shape, ranks, replica_slots, min_retention):
    """(bytes per rank and layer, need at the lowest rate, need with every row) over the sampled plans.

    plans: plans of the first arm as JSON. shape: {num_experts, hidden_size, intermediate_size, weight_bytes}."""
    if len(plans) > MAX_SAMPLES:
        plans = plans[::-(-len(plans) // MAX_SAMPLES)]
    shape = shape | {"packs_weights": packs_weights(plans[0], shape)}
    counts = [demand(plan, shape["num_experts"], ranks) for plan in plans]
    lowest = max(_needed(bin_dir, folder, c, shape, replica_slots, min_retention) for c in counts)
    highest = min(_needed(bin_dir, folder, c, shape, replica_slots, 1.0) for c in counts)
    if highest <= lowest:
        raise NoBudget(f"no budget separates the full backward pass ({highest} bytes) from one at retention "
                       f"{min_retention} ({lowest} bytes); pass a lower --min-retention")
    return int(lowest + POSITION * (highest - lowest)), lowest, highest
