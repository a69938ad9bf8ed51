"""Which runs make up the experiments: data only."""

from typing import Dict, NamedTuple, Optional, Tuple

SELECTIONS = ("lrm", "lrm_sampled", "grad_norm2", "grad_abs", "random")
# What `criteria` can compare and how the controller is told: selections, and corrections of what a selection leaves.
ARMS: Dict[str, Tuple[str, ...]] = {
    **{name: ("--selection", name) for name in SELECTIONS},
    "lrm_rows": ("--selection", "lrm", "--rescale", "rows"),
    "random_rows": ("--selection", "random", "--rescale", "rows"),
}


class Sizes(NamedTuple):
    seeds: Tuple[int, ...]
    pretrain_steps: int
    tune_steps: int
    scratch_steps: int
    timed_steps: int
    retentions: Tuple[float, ...]       # of `convergence`; the first is 1.0
    criteria_retentions: Tuple[float, ...]
    arms: Tuple[str, ...] = SELECTIONS  # of `criteria` and `probes`


FULL = Sizes((1, 2, 3), 800, 800, 800, 300, (1.0, 0.9, 0.8, 0.7), (0.8, 0.7))
QUICK = Sizes((1,), 120, 160, 100, 60, (1.0, 0.9, 0.8, 0.7), (0.8,))


def scaled(sizes, scale):
    """The same with `scale` times as many steps."""
    steps = {name: max(20, round(value * scale)) for name, value in sizes._asdict().items() if name.endswith("_steps")}
    return sizes._replace(**steps)


class Run(NamedTuple):
    """One job. `start`: the run whose end state it starts from, None: fresh weights.

    regime: "pretrain" (the large text), "tune" (a small text many times over), "scratch" (the large text, fresh weights),
    "timed" (as tune, on two ranks), "probe" (one gradient, no update)."""
    name: str
    regime: str
    seed: int
    steps: int
    retention: float = 1.0
    selection: str = "lrm"
    start: Optional[str] = None
    ranks: int = 1
    planner: str = "fixed"


def arm_name(retention, selection="lrm"):
    """"C20" for LRM at retention 0.8, "random20" for another of ARMS."""
    percent = round(100 * (1 - retention))
    return f"C{percent}" if selection == "lrm" or retention == 1.0 else f"{selection}{percent}"


def _arms(regime, seed, steps, start, retentions, arms):
    for retention in retentions:
        for selection in arms if retention < 1.0 else ("lrm",):
            yield Run(f"{regime}-{seed}-{arm_name(retention, selection)}", regime, seed, steps, retention, selection, start)


def _probes(seed, state, start, retention, arms):
    for selection, kept in [("lrm", 1.0)] + [(selection, retention) for selection in arms]:
        yield Run(f"probe_{state}-{seed}-{arm_name(kept, selection)}", "probe", seed, 1, kept, selection, start)


def all_runs(sizes, only):
    """Every run of the experiments named in `only`, in an order in which each start comes before its users."""
    runs: Dict[str, Run] = {}

    def add(*more):
        runs.update((run.name, run) for run in more)

    for seed in sizes.seeds:
        pretrained = f"pretrain-{seed}"
        add(Run(pretrained, "pretrain", seed, sizes.pretrain_steps))
        if "convergence" in only:
            add(*_arms("tune", seed, sizes.tune_steps, pretrained, sizes.retentions, ("lrm",)))
        if "criteria" in only:
            rates = (1.0, *sizes.criteria_retentions)
            add(*_arms("tune", seed, sizes.tune_steps, pretrained, rates, sizes.arms))
            add(*_arms("scratch", seed, sizes.scratch_steps, None, rates, sizes.arms))
        if "probes" in only:
            add(*_arms("tune", seed, sizes.tune_steps, pretrained, (1.0,), ()))
            retention = sizes.criteria_retentions[0]
            for state, start in (("fresh", None), ("pretrained", pretrained), ("tuned", f"tune-{seed}-C0")):
                add(*_probes(seed, state, start, retention, sizes.arms))
        if "time_to_loss" in only:
            for planner in ("fixed", "lrmoe"):
                add(Run(f"timed-{seed}-{planner}", "timed", seed, sizes.timed_steps, 1.0, "lrm", pretrained, 2, planner))
    return list(runs.values())
