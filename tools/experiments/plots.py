"""The experiments' plots, as PNG."""

import os
import statistics

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

from runs import arm_name  # noqa: E402


def _curves(folder, name, title, results, names_of, log=False):
    """Mean over seeds of the smoothed loss. names_of: {label: seed -> run}."""
    from report import smoothed
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for label, name_of in names_of.items():
        losses = [smoothed(results.of(name_of(seed))["loss"]) for seed in results.sizes.seeds]
        axes.plot([statistics.fmean(values) for values in zip(*losses)], label=label, linewidth=1)
    axes.set(title=title, xlabel="step", ylabel="nats per byte", **({"yscale": "log"} if log else {}))
    axes.grid(alpha=0.3)
    axes.legend()
    return _save(figure, folder, name)


def _bars(folder, name, labels, rows, value, linear_below=None):
    """Groups of one bar per arm. labels: (title, unit); rows: [(group, arm, entry)]; linear_below: logarithmic
    above this."""
    title, label = labels
    groups = list(dict.fromkeys(group for group, _, _ in rows))
    figure, axes = pyplot.subplots(figsize=(7, 4))
    arms = list(dict.fromkeys(arm for _, arm, _ in rows))
    for index, arm in enumerate(arms):
        entries = [value(entry) for group, s, entry in rows if s == arm]
        width = 0.8 / len(arms)
        axes.bar([i + (index - (len(arms) - 1) / 2) * width for i in range(len(groups))], [e["mean"] for e in entries],
                 width,
                 yerr=[e["spread"] or 0.0 for e in entries], label=arm, capsize=2)
    axes.set_xticks(range(len(groups)))
    axes.set_xticklabels(groups)
    axes.set(title=title, ylabel=label)
    if linear_below is not None:
        axes.set_yscale("symlog", linthresh=linear_below)
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
    return _save(figure, folder, name)


def _save(figure, folder, name):
    path = os.path.join(folder, name)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def plot_all(folder, results, summary):
    """Writes the plots of what the summary has and returns their paths."""
    paths = []
    if "convergence" in summary:
        paths.append(_curves(folder, "convergence.png", "Small text learnt by heart, LRM", results, {
            arm_name(r): lambda seed, r=r: f"tune-{seed}-{arm_name(r)}" for r in results.sizes.retentions}, log=True))
    if "criteria" in summary:
        rows = [(f"{row['regime']}, {row['retention']}", row["selection"], row) for row in summary["criteria"]]
        paths.append(_bars(folder, "criteria.png", ("Mean perplexity above C0's", "perplexity"), rows,
                           lambda row: row["delta_perplexity"], linear_below=0.01))
    if "probes" in summary:
        rows = [(row["state"], row["selection"], row) for row in summary["probes"]]
        for batches in (1, 32):
            paths.append(_bars(folder, f"gradients_{batches}.png",
                               (f"Direction of the experts' gradient, {batches} batches", "sine of the angle to the whole one"),
                               rows, lambda row, key=f"experts_angle_{batches}": row[key]))
    if "time_to_loss" in summary:
        paths.append(_curves(folder, "time_to_loss.png", "Small text learnt by heart, two ranks", results, {
            planner: lambda seed, planner=planner: f"timed-{seed}-{planner}" for planner in ("fixed", "lrmoe")}, log=True))
    return paths
