"""From the records of the training processes to summary.json and a table."""

import json
import os
import statistics

LOSS_WINDOW_FRACTION = 0.05  # loss_last is the mean over this last part of the steps
SKIPPED_STEPS_FRACTION = 0.1  # warm-up, left out of times


def read_arm(name, folder, ranks):
    """The arm as {name, steps: [...], validation_loss}; a step has loss, seconds, tokens and layers[l][rank]."""
    records = []
    for rank in range(ranks):
        with open(os.path.join(folder, f"rank-{rank}.jsonl")) as file:
            records.append([json.loads(line) for line in file])
    steps = []
    for parts in zip(*(rank[:-1] for rank in records)):
        layers = [list(layer) for layer in zip(*(part["layers"] for part in parts))]
        steps.append({"step": parts[0]["step"], "loss": parts[0]["loss"], "tokens": parts[0]["tokens"],
                      "seconds": max(part["seconds"] for part in parts), "layers": layers})
    return {"name": name, "steps": steps, "validation_loss": records[0][-1]["validation_loss"]}


def critical_backward_ms(layer, phase="total"):
    """Backward time of the rank that took longest, one layer invocation."""
    return max(rank["backward_ms"][phase] for rank in layer)


def summarize(arm, ranks, extra=None):
    """One entry of summary.json's `arms`. Times are medians over layer invocations, the first steps left out."""
    steps = arm["steps"]
    invocations = [layer for step in steps for layer in step["layers"]]
    timed_steps = steps[int(len(steps) * SKIPPED_STEPS_FRACTION):]
    timed = [layer for step in timed_steps for layer in step["layers"]]
    window = max(1, int(len(steps) * LOSS_WINDOW_FRACTION))
    mean = lambda values: statistics.fmean(values)  # noqa: E731
    by_rank = lambda field: [sum(layer[rank][field] for layer in invocations)  # noqa: E731
                             for rank in range(ranks)]
    routed_rows, kept_rows = sum(by_rank("routed_rows")), sum(by_rank("kept_rows"))
    total_score = sum(by_rank("total_score"))
    return {
        "name": arm["name"],
        "loss_first": steps[0]["loss"],
        "loss_last": mean(step["loss"] for step in steps[-window:]),
        "tokens_per_s": sum(s["tokens"] for s in timed_steps) / sum(s["seconds"] for s in timed_steps),
        "retention_rate_mean": mean(layer[0]["retention_rate"] for layer in invocations),
        "imbalance_before": mean(layer[0]["imbalance_before"] for layer in invocations),
        "imbalance_after": mean(layer[0]["imbalance_backward"] for layer in invocations),
        "imbalance_forward": mean(layer[0]["imbalance_forward"] for layer in invocations),
        "routed_rows": routed_rows,
        "kept_rows": kept_rows,
        "backward_ms_critical_rank": statistics.median(critical_backward_ms(layer) for layer in timed),
        "backward_cpu_ms_critical_rank": statistics.median(critical_backward_ms(layer, "cpu") for layer in timed),
        "peak_bytes_worker_max": max(rank["peak_bytes"] for layer in invocations for rank in layer),
        "predicted_bytes_worker_max": max(rank["predicted_bytes"] for layer in invocations for rank in layer),
        "plan_ms_p50": statistics.median(layer[0]["plan_ms"] for layer in invocations),
        "backward_rows_critical_rank": statistics.median(
            max(rank["backward_rows"] for rank in layer) for layer in invocations),
        "new_replicas": sum(layer[0]["new_replicas"] for layer in invocations),
        "retained_score": sum(by_rank("kept_score")) / total_score if total_score > 0 else 1.0,
        "validation_loss": arm["validation_loss"],
        **(extra or {}),
    }


def _bytes(value):
    return "none" if value is None else f"{value / 2**20:.2f} MiB"


ROWS = [
    ("loss, first step", "loss_first", "{:.4f}".format),
    ("loss, last steps", "loss_last", "{:.4f}".format),
    ("validation loss", "validation_loss", "{:.4f}".format),
    ("tokens per second", "tokens_per_s", "{:.0f}".format),
    ("rows routed", "routed_rows", "{:,}".format),
    ("rows kept by the backward pass", "kept_rows", "{:,}".format),
    ("retention rate, mean", "retention_rate_mean", "{:.3f}".format),
    ("score mass retained", "retained_score", "{:.3f}".format),
    ("imbalance before planning", "imbalance_before", "{:.3f}".format),
    ("imbalance of the backward pass", "imbalance_after", "{:.3f}".format),
    ("backward rows, critical rank, per layer", "backward_rows_critical_rank", "{:,.0f}".format),
    ("backward, critical rank, per layer", "backward_ms_critical_rank", "{:.2f} ms".format),
    ("  of that processor time", "backward_cpu_ms_critical_rank", "{:.2f} ms".format),
    ("memory budget per rank and layer", "memory_budget_bytes_per_layer", _bytes),
    ("peak memory per rank and layer", "peak_bytes_worker_max", _bytes),
    ("plans that did not fit", "plans_infeasible", "{:,}".format),
    ("replicas brought in", "new_replicas", "{:,}".format),
    ("planning, median", "plan_ms_p50", "{:.3f} ms".format),
]


def table(summary):
    """The arms side by side; the last column is the second arm over the first."""
    arms = summary["arms"]
    lines = [f"{'':42}" + "".join(f"{arm['name']:>16}" for arm in arms) + f"{'ratio':>9}"]
    for label, field, text in ROWS:
        values = [arm[field] for arm in arms]
        ratio = ""
        if len(values) == 2 and all(isinstance(v, (int, float)) for v in values) and values[0]:
            ratio = f"{values[1] / values[0]:.3f}"
        lines.append(f"{label:42}" + "".join(f"{text(value):>16}" for value in values) + f"{ratio:>9}")
    return "\n".join(line.rstrip() for line in lines)


GAP_MIN_STEPS = 100  # shorter runs end where the loss still falls steeply, and a few steps' lag shows


def verdict(summary):
    """(passed, sentences): did both arms learn, and the second as well as the first?"""
    full, compact = summary["arms"]
    entropy = summary["unigram_entropy"]
    gap = compact["loss_last"] / full["loss_last"] - 1
    checks = [
        (max(full["loss_last"], compact["loss_last"]) < 0.95 * entropy,
         f"both arms end at {full['loss_last']:.3f} and {compact['loss_last']:.3f} nats per byte; byte frequencies alone "
         f"give {entropy:.3f}"),
        (gap < 0.02 or summary["steps"] < GAP_MIN_STEPS,
         f"the compact arm's final loss is {gap:+.2%} from the full arm's"),
        (compact["retention_rate_mean"] < 1.0,
         f"Algorithm 1 kept {compact['retention_rate_mean']:.1%} of the rows under the budget"),
    ]
    return all(good for good, _ in checks), [("ok    " if good else "FAILED ") + text for good, text in checks]
