"""From the runs' results to tables, plots and summary.json."""

import json
import math
import os
import statistics
import subprocess

import torch

from runs import arm_name

LAST = 0.1  # part of the steps that "last steps" means
SMOOTH = 10  # steps
MODELLED = ("symi", "ultraep")
TARGET_POSITIONS = (0.5, 0.9)  # loss targets of time_to_loss: this far, in logarithms, to the last loss of the worse arm


class Results:
    def __init__(self, folder, sizes):
        self.folder, self.sizes, self._cache = folder, sizes, {}

    def of(self, name, rank=0):
        """result-RANK.json of a run."""
        if (name, rank) not in self._cache:
            with open(os.path.join(self.folder, "runs", name, f"result-{rank}.json")) as file:
                self._cache[name, rank] = json.load(file)
        return self._cache[name, rank]

    def seeds(self, name_of, figure):
        """{mean, spread, values} of figure(result) over seeds; spread is the sample standard deviation."""
        return spread([figure(self.of(name_of(seed))) for seed in self.sizes.seeds])


def spread(values):
    return {"mean": statistics.fmean(values), "spread": statistics.stdev(values) if len(values) > 1 else None,
            "values": values}


def text(entry, digits=4):
    tail = "" if entry["spread"] is None else f" ± {entry['spread']:.{digits}f}"
    return f"{entry['mean']:.{digits}f}{tail}"


def last_mean(values):
    return statistics.fmean(values[-max(1, int(len(values) * LAST)):])


def score_kept(result):
    """Share of the LRM score mass that was kept; nothing is scored where every row is kept."""
    return result["kept_score"] / result["total_score"] if result["total_score"] else 1.0


def perplexities(result):
    return [math.exp(min(loss, 20.0)) for loss in result["loss"]]


def convergence(results):
    """Figure 5: the small text learnt by heart from pretrained weights, at each retention."""
    rows = []
    for retention in results.sizes.retentions:
        def name(seed, retention=retention):
            return f"tune-{seed}-{arm_name(retention)}"
        entry = {"arm": arm_name(retention),
                 "perplexity_last": results.seeds(name, lambda r: last_mean(perplexities(r))),
                 "loss_after": results.seeds(name, lambda r: r["validation_loss"]),
                 "score_kept": results.seeds(name, score_kept),
                 "rows_kept": results.seeds(name, lambda r: r["kept"] / r["routed"])}
        base = [results.of(f"tune-{seed}-C0") for seed in results.sizes.seeds]
        entry["perplexity_last_minus_c0"] = spread([mine - last_mean(perplexities(b)) for mine, b in
                                                    zip(entry["perplexity_last"]["values"], base)])
        rows.append(entry)
    return rows


def criteria(results):
    """Table 2: mean over all steps of the perplexity above C0's on the same batch, for each criterion and rate."""
    rows = []
    for regime in ("tune", "scratch"):
        for retention in results.sizes.criteria_retentions:
            for selection in results.sizes.arms:
                deltas, halves, scores = [], [], []
                for seed in results.sizes.seeds:
                    mine = results.of(f"{regime}-{seed}-{arm_name(retention, selection)}")
                    change = [a - b for a, b in zip(perplexities(mine), perplexities(results.of(f"{regime}-{seed}-C0")))]
                    deltas.append(statistics.fmean(change))
                    halves.append(statistics.fmean(change[len(change) // 2:]))
                    scores.append(score_kept(mine))
                rows.append({"regime": regime, "retention": retention, "selection": selection,
                             "delta_perplexity": spread(deltas), "delta_perplexity_second_half": spread(halves),
                             "score_kept": spread(scores)})
    return rows


def probes(results):
    """The gradient each criterion leaves, against the whole one, in three states of the model, over 1 and 32 batches."""
    rows, retention = [], results.sizes.criteria_retentions[0]
    for state in ("fresh", "pretrained", "tuned"):
        for selection in results.sizes.arms:
            figures = {}
            for seed in results.sizes.seeds:
                whole, kept = (torch.load(os.path.join(results.folder, "runs", f"probe_{state}-{seed}-{arm}", "gradients.pt"))
                               for arm in ("C0", arm_name(retention, selection)))
                for batches in whole:
                    for part in ("experts", "dense"):
                        a, b = whole[batches][part].double(), kept[batches][part].double()
                        cosine = float(a @ b / (a.norm() * b.norm()))
                        figures.setdefault((part, batches, "angle"), []).append(math.sqrt(max(0.0, 1 - cosine ** 2)))
                        figures.setdefault((part, batches, "length"), []).append(float(a @ b / (a @ a)))
            rows.append({"state": state, "retention": retention, "selection": selection,
                         **{f"{part}_{kind}_{batches}": spread(values) for (part, batches, kind), values in figures.items()}})
    return rows


def smoothed(values):
    return [statistics.fmean(values[max(0, i - SMOOTH + 1):i + 1]) for i in range(len(values))]


def moe_ms(results, name):
    """Cumulative processor time of the MoE layers on the critical rank by step, (forward, backward): the sum over layers of
    the slowest rank's."""
    ranks = [results.of(name, rank)["moe_cpu_ms"] for rank in (0, 1)]
    totals, cumulative = [0.0, 0.0], []
    for step in range(len(ranks[0])):
        for phase in (0, 1):
            totals[phase] += sum(max(rank[step][layer][phase] for rank in ranks) for layer in range(len(ranks[0][step])))
        cumulative.append(tuple(totals))
    return cumulative


def modelled(results, seed, bin_dir):
    """{policy: (forward, backward) time over that of fixed ownership} of policies that the workers do not execute but that
    change no result: their imbalance over fixed ownership's, on the routing of the fixed arm, by lrmoe-sim."""
    ranks = [results.of(f"timed-{seed}-fixed", rank)["counts"] for rank in (0, 1)]
    path = os.path.join(results.folder, "runs", f"timed-{seed}-fixed", "routing.jsonl")
    with open(path, "w") as file:
        header = {"format": "routing-counts", "version": 1, "model": "tools/experiments", "num_experts": len(ranks[0][0][0]),
                  "top_k": 4, "num_source_ranks": 2, "num_layers": len(ranks[0][0])}
        print(json.dumps(header), file=file)
        for step, layers in enumerate(zip(*ranks)):
            for layer, counts in enumerate(zip(*layers)):
                print(json.dumps({"step": step, "layer": layer, "counts": counts}), file=file)
    done = subprocess.run([os.path.join(bin_dir, "lrmoe-sim"), "replay", "--trace", path, "--policies",
                           ",".join(("fixed", *MODELLED)), "--ranks", "2", "--replica-slots", "2", "--output", "json"],
                          capture_output=True, text=True, check=True)
    imbalance = {entry["policy"]: [entry[f"imbalance_{phase}"]["mean"] for phase in ("forward", "backward")]
                 for entry in json.loads(done.stdout)["policies"]}
    return {policy: [a / b for a, b in zip(imbalance[policy], imbalance["fixed"])] for policy in MODELLED}


def time_to_loss(results, bin_dir):
    """Table 1: cumulative critical-rank processor time of the MoE layers until fixed losses, a small text learnt by heart from
    pretrained weights. `fixed` and `lrmoe` are measured, the others modelled from the fixed arm."""
    rows = []
    for seed in results.sizes.seeds:
        curves = {planner: smoothed(results.of(f"timed-{seed}-{planner}")["loss"]) for planner in ("fixed", "lrmoe")}
        worse_end = max(min(curve) for curve in curves.values())
        first = min(curve[0] for curve in curves.values())
        ratios = modelled(results, seed, bin_dir)
        for position in TARGET_POSITIONS:
            target = first ** (1 - position) * worse_end ** position
            entry = {"seed": seed, "target": target}
            for planner, curve in curves.items():
                step = next(i for i, loss in enumerate(curve) if loss <= target + 1e-12)
                result = results.of(f"timed-{seed}-{planner}")
                times = moe_ms(results, f"timed-{seed}-{planner}")[step]
                entry[planner] = {"step": step + 1, "moe_cpu_ms": sum(times), "rows_kept": result["kept"] / result["routed"]}
                if planner == "fixed":
                    for policy, ratio in ratios.items():
                        entry[policy] = {"step": step + 1, "moe_cpu_ms": sum(t * r for t, r in zip(times, ratio)),
                                         "modelled": True}
            rows.append(entry)
    return rows


def tables(summary):
    lines = []
    if "convergence" in summary:
        lines += ["", "convergence: perplexity of the last tenth of the steps, small text learnt by heart",
                  f"{'arm':>5}  {'perplexity':>20}  {'minus C0':>20}  {'rows kept':>10}  {'score kept':>10}"]
        for row in summary["convergence"]:
            lines.append(f"{row['arm']:>5}  {text(row['perplexity_last'], 5):>20}  "
                         f"{text(row['perplexity_last_minus_c0'], 5):>20}  {row['rows_kept']['mean']:>10.3f}  "
                         f"{row['score_kept']['mean']:>10.4f}")
    if "criteria" in summary:
        lines += ["", "criteria: mean perplexity above C0's on the same batches",
                  f"{'regime':>8} {'kept':>5}  {'arm':>11}  {'all steps':>20}  {'second half':>20}  {'score kept':>10}"]
        for row in summary["criteria"]:
            lines.append(f"{row['regime']:>8} {row['retention']:>5}  {row['selection']:>11}  "
                         f"{text(row['delta_perplexity']):>20}  {text(row['delta_perplexity_second_half']):>20}  "
                         f"{row['score_kept']['mean']:>10.4f}")
    if "probes" in summary:
        lines += ["", "the gradient that is left, against the whole one, over 1 and 32 batches (sine: of the angle between them; "
                  "length: along it)",
                  f"{'state':>10}  {'arm':>11}  {'experts: sine 1':>16} {'sine 32':>16} {'length 32':>9}"
                  f"  {'dense: sine 1':>16} {'sine 32':>16}"]
        for row in summary["probes"]:
            lines.append(f"{row['state']:>10}  {row['selection']:>11}  {text(row['experts_angle_1'], 3):>16} "
                         f"{text(row['experts_angle_32'], 3):>16} {row['experts_length_32']['mean']:>9.3f}  "
                         f"{text(row['dense_angle_1'], 3):>16} {text(row['dense_angle_32'], 3):>16}")
    if "time_to_loss" in summary:
        lines += ["", "time to loss: processor time of the MoE layers on the critical rank, two ranks (* modelled from fixed)",
                  f"{'seed':>5}  {'loss':>7}" + "".join(f"  {name:>18}" for name in ("fixed", "symi *", "ultraep *", "lrmoe"))
                  + f"  {'rows kept':>9}"]
        for row in summary["time_to_loss"]:
            arms = [f"{row[p]['moe_cpu_ms'] / 1000:.2f} s, {row[p]['step']} steps" for p in ("fixed", *MODELLED, "lrmoe")]
            lines.append(f"{row['seed']:>5}  {row['target']:>7.3f}" + "".join(f"  {arm:>18}" for arm in arms)
                         + f"  {row['lrmoe']['rows_kept']:>9.3f}")
    return "\n".join(lines)


def write(folder, runs, sizes, only, bin_dir):
    """Writes summary.json and the plots; returns the tables. bin_dir: the built programs."""
    import plots
    results = Results(folder, sizes)
    summary = {"sizes": sizes._asdict(), "runs": [run._asdict() for run in runs], "cores": os.cpu_count()}
    if "convergence" in only:
        summary["convergence"] = convergence(results)
    if "criteria" in only:
        summary["criteria"] = criteria(results)
    if "probes" in only:
        summary["probes"] = probes(results)
    if "time_to_loss" in only:
        summary["time_to_loss"] = time_to_loss(results, bin_dir)
    path = os.path.join(folder, "summary.json")
    with open(path, "w") as file:
        json.dump(summary, file, indent=1)
    return "\n".join([tables(summary), "", path, *plots.plot_all(folder, results, summary)])
