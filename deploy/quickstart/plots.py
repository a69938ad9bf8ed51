"""The quickstart's plots, as PNG."""

import os

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker  # noqa: E402

from report import critical_backward_ms  # noqa: E402

COLORS = {"full": "tab:gray", "lrmoe": "tab:blue"}


def _smooth(values, window=10):
    return [sum(values[max(0, i - window + 1):i + 1]) / (i + 1 - max(0, i - window + 1)) for i in range(len(values))]


def _per_step(arm, of_layer, reduce):
    return [reduce([of_layer(layer) for layer in step["layers"]]) for step in arm["steps"]]


def _mean(values):
    return sum(values) / len(values)


def _save(figure, folder, name):
    path = os.path.join(folder, name)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _lines(folder, name, labels, series, floor=None, from_zero=False):
    """labels: (title, unit). series: [(label, values, style)]. floor: (label, value) of a dotted line."""
    title, unit = labels
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for label, values, style in series:
        axes.plot(values, label=label, **style)
    if floor is not None:
        axes.axhline(floor[1], color="black", linewidth=0.8, linestyle=":", label=floor[0])
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    axes.legend()
    return _save(figure, folder, name)


def plot_all(arms, unigram_entropy, budget_bytes, folder):
    """Writes every plot to folder and returns their paths."""
    style = {arm["name"]: {"color": COLORS.get(arm["name"])} for arm in arms}

    def series(of_layer, reduce, window=10):
        return [(arm["name"], _smooth(_per_step(arm, of_layer, reduce), window), style[arm["name"]]) for arm in arms]

    compact = arms[-1]
    imbalance = [
        (label, _smooth(_per_step(compact, lambda layer, f=field: layer[0][f], _mean)), {"color": color})
        for label, field, color in (("before planning", "imbalance_before", "tab:red"),
                                    ("planned forward", "imbalance_forward", "tab:orange"),
                                    ("planned backward", "imbalance_backward", "tab:blue"))]
    mib = 2**20
    budget = None if budget_bytes is None else ("budget", budget_bytes / mib)
    processor_time = [
        (f"{arm['name']}, processor time",
         _smooth(_per_step(arm, lambda layer: critical_backward_ms(layer, "cpu"), sum)),
         {**style[arm["name"]], "linestyle": "--"}) for arm in arms]
    routed = ("routed", _per_step(compact, lambda layer: sum(r["routed_rows"] for r in layer), sum),
              {"color": "black", "linewidth": 0.8})
    return [
        _lines(folder, "loss.png", ("Training loss (mean of 10 steps)", "nats per byte"),
               [(arm["name"], _smooth([step["loss"] for step in arm["steps"]]), style[arm["name"]]) for arm in arms],
               ("byte frequencies alone", unigram_entropy)),
        _lines(folder, "imbalance.png",
               (f"Imbalance, arm {compact['name']} (mean of layers and 10 steps)", "most loaded rank / mean"), imbalance,
               ("balanced", 1.0)),
        _lines(folder, "kept_rows.png", ("Rows kept by the backward pass, all layers and ranks", "rows per step"),
               [routed] + series(lambda layer: sum(r["kept_rows"] for r in layer), sum, 1), from_zero=True),
        _lines(folder, "backward_ms.png", ("Backward of the critical rank, all layers (mean of 10 steps)", "ms per step"),
               series(critical_backward_ms, sum) + processor_time, from_zero=True),
        _lines(folder, "peak_bytes.png", ("Peak memory of the fullest rank, largest layer", "MiB"),
               series(lambda layer: max(r["peak_bytes"] for r in layer) / mib, max, 1), budget, from_zero=True),
    ]
